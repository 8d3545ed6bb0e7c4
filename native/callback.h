/* Between llama.cpp's graph and the memory that weights are streamed through.
 *
 * In: every node of a graph before it is computed, and some after. Out: nodes whose
 * weight is streamed see it through a private view, where its bytes are when the node is
 * computed; experts are chosen by record instead of by number. llama.cpp's own tensors
 * stay as they are. Knows no files.
 *
 * A weight that can't be read, or is used in a way that is not known here, ends the pass:
 * its node is not computed, the graph is aborted, and the fault tells why.
 */

#ifndef HEADRACE_CALLBACK_H
#define HEADRACE_CALLBACK_H

#include "buftype.h"
#include "lookahead.h"
#include "pool.h"
#include "ring.h"

#define CALLBACK_MAX_BLOCKS 512u  /* llama-hparams.h, LLAMA_MAX_LAYERS */
#define CALLBACK_MAX_SKIPPED 64u

/* A layer whose experts are streamed. */
struct callback_layer {
    struct pool *pool;
    unsigned pool_layer;
    unsigned n_parts;
    unsigned n_experts;
    const struct ggml_tensor *chosen;  /* the node with the experts chosen, in this pass */
    struct ggml_tensor ids;            /* the same, as records of the pool */
    const struct ggml_tensor *router;  /* its weights, as the last pass used them, or NULL */
    const struct ggml_tensor *state;   /* what they were applied to, in this pass */
    const struct ggml_tensor *norm;    /* weights that made state of its input, or NULL */
    const struct callback_layer *next; /* the streamed layer behind it, or NULL */
};

/* A streamed weight; the extra of its tensor points to it. */
struct callback_weight {
    struct ggml_tensor *tensor;     /* llama.cpp's; NULL until it is loaded */
    void *address;                  /* of the tensor, where nothing is */
    struct ggml_tensor view;        /* ours; without extra, by which ggml chooses kernels */
    struct callback_layer *layer;   /* NULL: dense */
    unsigned index;                 /* dense: in the ring; experts: the part */
};

struct callback_fault {
    struct fault read;           /* error 0: none; -ENOTSUP: the node is not known */
    char node[GGML_MAX_NAME];
    char weight[GGML_MAX_NAME];  /* "" if it is not about one */
};

/* Initialise with callback_init; fields belong to callback.c. */
struct callback {
    const struct ggml_functions *ggml;
    const struct buftype *buftype;
    struct callback_weight *weights;                       /* all that are streamed */
    size_t n_weights;
    struct ring *ring;                                     /* NULL: nothing dense */
    struct callback_layer *layer_of[CALLBACK_MAX_BLOCKS];  /* by block; NULL: none */
    struct callback_layer *at_hand;
    int32_t *experts;
    int32_t *records;
    size_t n_ids;  /* room in experts and records */
    bool is_short;              /* the pass is one that guesses are made in */
    size_t n_used;              /* experts that a token used in the layer at hand */
    float *state;               /* of one token, for a guess */
    size_t n_state;
    uint64_t started_ns;        /* of the pass */
    struct lookahead_trial trial;
    struct callback_fault fault;
    struct ggml_tensor *skipped[CALLBACK_MAX_SKIPPED];
    unsigned n_skipped;
};

void callback_init(struct callback *callback, const struct ggml_functions *ggml,
                   const struct buftype *buftype, struct callback_weight *weights,
                   size_t n_weights);

/* ggml_backend_sched_eval_callback; user is the callback. */
bool callback_eval(struct ggml_tensor *node, bool is_asked, void *user);

/* ggml_abort_callback; user is the callback. */
bool callback_abort(void *user);

/* End a pass, whether or not it was aborted, and return its fault. */
struct callback_fault callback_finish(struct callback *callback);

void callback_deinit(struct callback *callback);

#endif
