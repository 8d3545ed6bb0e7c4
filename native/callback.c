#define _POSIX_C_SOURCE 199309L  /* clock_gettime */

#include "callback_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"

/* llama-graph.cpp, build_moe_ffn */
static const char chosen_prefix[] = "ffn_moe_topk-";

void
callback_init(struct callback *callback, const struct ggml_functions *ggml,
              const struct buftype *buftype, struct callback_weight *weights,
              size_t n_weights)
{
    *callback = (struct callback){
        .ggml = ggml, .buftype = buftype, .weights = weights, .n_weights = n_weights};
}

void
callback_deinit(struct callback *callback)
{
    free(callback->experts);
    free(callback->records);
    free(callback->state);
}

struct callback_layer *
callback_layer_of(const struct callback *callback, const struct ggml_tensor *node,
                  const char *prefix)
{
    size_t n = strlen(prefix);
    if (strncmp(node->name, prefix, n) != 0) {
        return NULL;
    }
    char *end;
    unsigned long block = strtoul(node->name + n, &end, 10);
    bool is_block = end != node->name + n && *end == '\0' && block < CALLBACK_MAX_BLOCKS;
    return is_block ? callback->layer_of[block] : NULL;
}

/* Keep node from being computed, and the graph from going on after it. */
static bool
skip(struct callback *callback, struct ggml_tensor *node, int error,
     const struct callback_weight *weight)
{
    struct callback_fault *fault = &callback->fault;
    if (fault->node[0] == '\0') {
        fault->read.error = fault->read.error == 0 ? error : fault->read.error;
        memcpy(fault->node, node->name, sizeof fault->node);
        if (weight != NULL) {
            memcpy(fault->weight, weight->tensor->name, sizeof fault->weight);
        }
    }
    if (callback->n_skipped == CALLBACK_MAX_SKIPPED) {
        abort();  /* ggml asks after each operation whether to go on: it never did */
    }
    callback->skipped[callback->n_skipped++] = node;
    node->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
    return true;
}

static bool
bind_dense(struct callback *callback, struct ggml_tensor *node,
           struct callback_weight *weight)
{
    void *data;
    int error = ring_get(callback->ring, weight->index, &data, &callback->fault.read);
    if (error != 0) {
        return skip(callback, node, error, weight);
    }
    weight->view.data = data;
    node->src[0] = &weight->view;
    return true;
}

/* Return whether a part of layer is still being read: what is there can be used first. */
static bool
is_reading(const struct callback_layer *layer)
{
    for (unsigned part = 0; part < layer->n_parts; part++) {
        if (!pool_is_ready(layer->pool, part)) {
            return true;
        }
    }
    return false;
}

/* Return whether ids are those that layer chose: as they were computed, our records in
 * their place, or a copy in other memory, which is named after both. */
static bool
is_choice(const struct callback_layer *layer, const struct ggml_tensor *ids)
{
    if (ids == layer->chosen || ids == &layer->ids) {
        return true;
    }
    const char *start = ids == NULL ? NULL : strchr(ids->name, '#');
    size_t n = strlen(layer->chosen->name);
    return start != NULL && strncmp(start + 1, layer->chosen->name, n) == 0
           && start[1 + n] == '#';
}

static bool
bind_experts(struct callback *callback, struct ggml_tensor *node,
             struct callback_weight *weight)
{
    struct callback_layer *layer = weight->layer;
    if (callback->at_hand != layer || !is_choice(layer, node->src[2])) {
        return skip(callback, node, -ENOTSUP, weight);
    }
    int error = pool_wait(layer->pool, weight->index, &callback->fault.read);
    if (error != 0) {
        return skip(callback, node, error, weight);
    }
    size_t n_records = pool_n_records(layer->pool);
    struct ggml_tensor *view = &weight->view;
    view->data = pool_data(layer->pool, layer->pool_layer, weight->index);
    view->ne[2] = (int64_t)n_records;
    view->nb[2] = pool_stride(layer->pool);
    view->nb[3] = view->nb[2] * n_records;
    node->src[0] = view;
    node->src[2] = &layer->ids;
    return is_reading(layer);
}

/* Return the streamed weight that tensor, placed in our buffer type, or one of our views
 * is; NULL: it is a view of one that is not ours. */
static struct callback_weight *
weight_of(const struct callback *callback, const struct ggml_tensor *tensor)
{
    uintptr_t offset = (uintptr_t)tensor - (uintptr_t)callback->weights;
    if (offset < callback->n_weights * sizeof *callback->weights) {
        return &callback->weights[offset / sizeof *callback->weights];
    }
    return tensor->view_src == NULL ? tensor->extra : NULL;
}

/* Have the weight that is source i of node there. Returns whether to stop after node. */
static bool
bind(struct callback *callback, struct ggml_tensor *node, unsigned i)
{
    struct callback_weight *weight = weight_of(callback, node->src[i]);
    if (callback->fault.read.error != 0) {
        return skip(callback, node, 0, weight);
    }
    if (weight != NULL && i == 0 && weight->layer == NULL && node->op == GGML_OP_MUL_MAT) {
        return bind_dense(callback, node, weight);
    }
    if (weight != NULL && i == 0 && weight->layer != NULL
        && node->op == GGML_OP_MUL_MAT_ID) {
        return bind_experts(callback, node, weight);
    }
    return skip(callback, node, -ENOTSUP, weight);
}

/* Views read nothing; what reads through one is asked about itself. */
static bool
is_view(const struct ggml_tensor *node)
{
    return node->op == GGML_OP_NONE || node->op == GGML_OP_RESHAPE
           || node->op == GGML_OP_VIEW || node->op == GGML_OP_PERMUTE
           || node->op == GGML_OP_TRANSPOSE;
}

static bool
before(struct callback *callback, struct ggml_tensor *node)
{
    if (callback_layer_of(callback, node, chosen_prefix) != NULL
        || callback_guesses_after(callback, node)) {
        return true;
    }
    callback_note_router(callback, node);
    if (is_view(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
        return false;
    }
    bool stops = false;
    for (unsigned i = 0; i < GGML_MAX_SRC; i++) {
        if (node->src[i] != NULL && buftype_holds(callback->buftype, node->src[i])) {
            stops |= bind(callback, node, i);
        }
    }
    return stops;
}

/* Have room for n ids. Returns 0 or -errno. */
static int
reserve_ids(struct callback *callback, size_t n)
{
    if (n <= callback->n_ids) {
        return 0;
    }
    free(callback->experts);
    free(callback->records);
    callback->experts = calloc(n, sizeof *callback->experts);
    callback->records = calloc(n, sizeof *callback->records);
    bool is_there = callback->experts != NULL && callback->records != NULL;
    callback->n_ids = is_there ? n : 0;
    return is_there ? 0 : -ENOMEM;
}

/* Have the experts read that node, which is computed, has chosen for layer. */
static int
take(struct callback *callback, struct callback_layer *layer,
     const struct ggml_tensor *node)
{
    if (node->type != GGML_TYPE_I32 || node->nb[0] != sizeof(int32_t) || node->ne[2] != 1
        || node->ne[3] != 1) {
        return -ENOTSUP;
    }
    size_t n_used = (size_t)node->ne[0];
    size_t n_tokens = (size_t)node->ne[1];
    int error = reserve_ids(callback, n_used * n_tokens);
    if (error != 0) {
        return error;
    }
    /* The rows are those of a sort of all experts: they don't lie back to back. */
    for (size_t i = 0; i < n_tokens; i++) {
        callback->ggml->tensor_get(node, callback->experts + i * n_used, i * node->nb[1],
                                   n_used * sizeof(int32_t));
    }
    layer->chosen = node;
    layer->ids = *node;
    layer->ids.op = GGML_OP_NONE;
    memset(layer->ids.src, 0, sizeof layer->ids.src);
    layer->ids.view_src = NULL;
    layer->ids.data = callback->records;
    layer->ids.nb[1] = n_used * sizeof(int32_t);
    layer->ids.nb[2] = layer->ids.nb[3] = layer->ids.nb[1] * n_tokens;
    callback->at_hand = layer;
    error = pool_take(layer->pool, layer->pool_layer, callback->experts, n_used * n_tokens,
                      callback->records);
    callback->is_short = n_tokens <= CALLBACK_MAX_GUESS_TOKENS;
    callback->n_used = n_used;
    if (error == 0) {
        callback_guess_early(callback, layer, n_tokens);
    }
    return error;
}

static void
after(struct callback *callback, const struct ggml_tensor *node)
{
    if (callback->ring != NULL) {
        ring_release(callback->ring);
    }
    if (callback->fault.read.error != 0) {
        return;
    }
    callback_guess_late(callback, node);
    struct callback_layer *layer = callback_layer_of(callback, node, chosen_prefix);
    if (layer == NULL) {
        return;
    }
    int error = take(callback, layer, node);
    if (error != 0) {
        callback->fault.read.error = error;
        memcpy(callback->fault.node, node->name, sizeof callback->fault.node);
    }
}

bool
callback_eval(struct ggml_tensor *node, bool is_asked, void *user)
{
    struct callback *callback = user;
    if (callback->started_ns == 0) {
        callback->started_ns = clock_ns();
    }
    if (is_asked) {
        return before(callback, node);
    }
    after(callback, node);
    /* False would end the graph without an error; callback_abort ends it with one. */
    return true;
}

bool
callback_abort(void *user)
{
    const struct callback *callback = user;
    return callback->fault.read.error != 0;
}

struct callback_fault
callback_finish(struct callback *callback)
{
    struct callback_fault fault = callback->fault;
    callback->fault = (struct callback_fault){0};
    while (callback->n_skipped > 0) {
        callback->skipped[--callback->n_skipped]->flags |= GGML_TENSOR_FLAG_COMPUTE;
    }
    if (callback->ring != NULL) {
        ring_release(callback->ring);
    }
    if (callback->at_hand != NULL) {
        pool_release(callback->at_hand->pool);
        callback->at_hand = NULL;
    }
    if (callback->is_short && fault.read.error == 0) {
        lookahead_next(&callback->trial, clock_ns() - callback->started_ns);
    }
    callback->is_short = false;
    callback->started_ns = 0;
    return fault;
}
