/* One model's weights on their way from its files to llama.cpp: owns all that takes part.
 *
 * In: a description of the files and of the weights that are streamed. Out: a FILE to
 * load the model from, a buffer type for the streamed weights, and the two callbacks of a
 * context. Knows no GGUF: where tensors lie is told.
 *
 * Order of calls: stream_open, load the model from stream_file with the buffer type,
 * stream_start; then contexts with the callbacks, and stream_finish after each
 * llama_decode; free contexts and model, stream_close. All but stream_get_stats belong to
 * one thread at a time. Failures are negative errno values.
 */

#ifndef HEADRACE_STREAM_H
#define HEADRACE_STREAM_H

#include "callback.h"
#include "vfile.h"

/* A tensor that is streamed. Those of one block with experts follow each other, in the
 * order of use; dense ones are in the order of use too. */
struct stream_weight {
    char name[GGML_MAX_NAME];
    unsigned file;
    uint64_t offset;
    uint64_t len;
    int block;           /* of experts; -1: dense */
    unsigned n_experts;
    unsigned pool;
};

struct stream_config {
    const struct ggml_functions *ggml;
    const char *const *paths;
    unsigned n_files;
    unsigned n_threads;
    bool is_buffered;
    const struct vfile_extent *extents;  /* of the file that the model is loaded from */
    size_t n_extents;
    const struct stream_weight *weights;
    unsigned n_weights;
    const size_t *pool_records;  /* of each pool */
    unsigned n_pools;
    unsigned n_ring_slots;       /* 0: nothing dense is streamed */
    enum policy_kind policy;
    enum lookahead_mode lookahead;
};

struct stream_stats {
    struct readers_stats reads;
    uint64_t n_hits, n_misses, n_evictions;  /* expert records */
    uint64_t n_guesses, n_useful, n_late;    /* experts read ahead of their choice */
    uint64_t n_ahead, n_demand;              /* dense tensors */
    uint64_t stall_ns;
    uint64_t resident_bytes;                 /* pools and ring */
};

struct stream;

/* Open the files of a model; config is copied with all that it points to, except the
 * memory of extents, which must stay until stream_start. Returns 0 and the stream, or
 * -errno with the index of the file that failed (n_files: none). -ENOTSUP: ggml is not the
 * version that we know. */
int stream_open(struct stream **out, const struct stream_config *config,
                unsigned *failed);

/* Return whether all files are read past the page cache. */
bool stream_is_direct(const struct stream *stream);

/* Return the file to load the model from; stream_start closes it: then NULL. */
FILE *stream_file(struct stream *stream);

/* Return the first fault of reads through stream_file. */
struct fault stream_load_fault(const struct stream *stream);

struct ggml_backend_buffer_type *stream_buffer_type(struct stream *stream);

/* Take the memory that weights are streamed through, after the model was loaded. Returns
 * 0 or -errno; -EINVAL: a weight was not placed in the buffer type. */
int stream_start(struct stream *stream);

/* Return what callback_eval and callback_abort want as user. */
struct callback *stream_callback(struct stream *stream);

/* End a pass; see callback_finish. */
struct callback_fault stream_finish(struct stream *stream);

/* Return the routed experts of all blocks, numbered block by block in the order of pools;
 * 0 before stream_start. */
size_t stream_n_experts(const struct stream *stream);

/* Put into uses[0..stream_n_experts) how many passes have used each expert. */
void stream_get_uses(const struct stream *stream, uint32_t *uses);

#define STREAM_MAX_FILL 64u

/* Read experts[0..n), numbers from above, STREAM_MAX_FILL at most, into records that are
 * free; between passes. Returns how many were read; see pool_fill. */
size_t stream_fill(struct stream *stream, const uint32_t *experts, size_t n);

/* Use only the first n_records of a pool from now on; between passes. See pool_resize. */
int stream_resize(struct stream *stream, unsigned pool, size_t n_records);

/* Return what happened since the stream was opened; from any thread, but not while
 * stream_start or stream_close runs. */
struct stream_stats stream_get_stats(const struct stream *stream);

/* Free all; NULL is none. */
void stream_close(struct stream *stream);

#endif
