#include "stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct stream {
    struct ggml_functions ggml;
    struct source *source;
    struct vfile *vfile;
    struct vfile_extent *extents;
    struct buftype buftype;
    struct callback callback;
    struct stream_weight *described;
    struct callback_weight *weights;
    unsigned n_weights;
    struct callback_layer *layers;
    size_t *pool_records;
    struct pool **pools;
    unsigned n_pools;
    unsigned n_ring_slots;
    enum policy_kind policy;
    struct ring *ring;
    uint64_t ring_bytes;
};

static void *
copy(const void *items, size_t n, size_t item_bytes)
{
    void *made = calloc(n == 0 ? 1 : n, item_bytes);
    if (made != NULL && n > 0) {
        memcpy(made, items, n * item_bytes);
    }
    return made;
}

/* Take note of a tensor that llama.cpp places, and point it at the sink. */
static bool
bind_tensor(void *owner, struct ggml_tensor *tensor)
{
    struct stream *stream = owner;
    for (unsigned i = 0; i < stream->n_weights; i++) {
        struct callback_weight *weight = &stream->weights[i];
        if (strncmp(stream->described[i].name, tensor->name, GGML_MAX_NAME) == 0) {
            weight->tensor = tensor;
            weight->address = tensor->data;
            tensor->data = stream->buftype.sink.data;
            tensor->extra = weight;
            return true;
        }
    }
    return false;
}

static int
copy_config(struct stream *stream, const struct stream_config *config)
{
    stream->ggml = *config->ggml;
    stream->n_weights = config->n_weights;
    stream->n_pools = config->n_pools;
    stream->n_ring_slots = config->n_ring_slots;
    stream->policy = config->policy;
    stream->extents = copy(config->extents, config->n_extents, sizeof *stream->extents);
    stream->described = copy(config->weights, config->n_weights, sizeof *config->weights);
    stream->pool_records =
        copy(config->pool_records, config->n_pools, sizeof *stream->pool_records);
    stream->weights = calloc(config->n_weights + 1, sizeof *stream->weights);
    stream->layers = calloc(CALLBACK_MAX_BLOCKS, sizeof *stream->layers);
    stream->pools = calloc(config->n_pools + 1, sizeof *stream->pools);
    bool is_there = stream->extents != NULL && stream->described != NULL
                    && stream->pool_records != NULL && stream->weights != NULL
                    && stream->layers != NULL && stream->pools != NULL;
    return is_there ? 0 : -ENOMEM;
}

int
stream_open(struct stream **out, const struct stream_config *config, unsigned *failed)
{
    *out = NULL;
    *failed = config->n_files;
    int error = buftype_check(config->ggml);
    if (error != 0) {
        return error;
    }
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) {
        return -ENOMEM;
    }
    uint64_t max_bytes = 0;
    error = copy_config(stream, config);
    for (unsigned i = 0; i < config->n_weights; i++) {
        uint64_t len = config->weights[i].len;
        max_bytes = len > max_bytes ? len : max_bytes;
    }
    if (error == 0) {
        error = source_open(&stream->source, config->paths, config->n_files,
                            config->n_threads, config->is_buffered, failed);
    }
    if (error == 0) {
        error = vfile_create(&stream->vfile, stream->source, stream->extents,
                             config->n_extents);
    }
    if (error == 0) {
        error = buftype_init(&stream->buftype, &stream->ggml, max_bytes, bind_tensor,
                             stream);
    }
    if (error != 0) {
        stream_close(stream);
        return error;
    }
    callback_init(&stream->callback, &stream->ggml, &stream->buftype, stream->weights,
                  stream->n_weights);
    stream->callback.trial.mode = config->lookahead;
    *out = stream;
    return 0;
}

bool
stream_is_direct(const struct stream *stream)
{
    bool is_direct = true;
    for (unsigned i = 0; i < stream->source->n_files; i++) {
        is_direct = is_direct && stream->source->files[i].file.is_direct;
    }
    return is_direct;
}

FILE *
stream_file(struct stream *stream)
{
    return stream->vfile == NULL ? NULL : vfile_stream(stream->vfile);
}

struct fault
stream_load_fault(const struct stream *stream)
{
    return stream->vfile == NULL ? (struct fault){0} : vfile_fault(stream->vfile);
}

struct ggml_backend_buffer_type *
stream_buffer_type(struct stream *stream)
{
    return &stream->buftype.type;
}

/* Make a ring of the dense weights. Returns 0 or -errno. */
static int
start_ring(struct stream *stream)
{
    struct ring_tensor *tensors = calloc(stream->n_weights + 1, sizeof *tensors);
    if (tensors == NULL) {
        return -ENOMEM;
    }
    unsigned n = 0;
    size_t max_bytes = 0;
    for (unsigned i = 0; i < stream->n_weights; i++) {
        const struct stream_weight *w = &stream->described[i];
        if (w->block < 0) {
            tensors[n] = (struct ring_tensor){w->file, w->offset, (size_t)w->len};
            max_bytes = tensors[n].len > max_bytes ? tensors[n].len : max_bytes;
            stream->weights[i].index = n++;
        }
    }
    int error = 0;
    if (n > 0) {
        error = ring_create(&stream->ring, stream->source, tensors, n,
                            stream->n_ring_slots);
        stream->ring_bytes = stream->n_ring_slots * ring_slot_bytes(max_bytes);
    }
    stream->callback.ring = stream->ring;
    free(tensors);
    return error;
}

/* Describe the layers of pool i. Returns how many there are, or -EINVAL. */
static int
collect_layers(struct stream *stream, unsigned pool, struct pool_layer *layers,
               unsigned *n_parts)
{
    int n_layers = 0;
    unsigned part = 0;
    int block = -1;
    *n_parts = 0;
    for (unsigned i = 0; i < stream->n_weights; i++) {
        const struct stream_weight *w = &stream->described[i];
        if (w->block < 0 || w->pool != pool) {
            continue;
        }
        part = w->block == block ? part + 1 : 0;
        if (w->block >= (int)CALLBACK_MAX_BLOCKS || part == POOL_MAX_PARTS
            || w->n_experts == 0 || w->len % w->n_experts != 0) {
            return -EINVAL;
        }
        n_layers += part == 0;
        block = w->block;
        struct pool_layer *layer = &layers[n_layers - 1];
        layer->n_experts = w->n_experts;
        layer->parts[part] =
            (struct pool_part){w->file, w->offset, (size_t)(w->len / w->n_experts)};
        *n_parts = part + 1 > *n_parts ? part + 1 : *n_parts;
        stream->weights[i].index = part;
        stream->weights[i].layer = &stream->layers[block];
        stream->callback.layer_of[block] = &stream->layers[block];
        stream->layers[block].pool_layer = (unsigned)n_layers - 1;
        stream->layers[block].n_experts = w->n_experts;
    }
    return n_layers;
}

static int
start_pool(struct stream *stream, unsigned i)
{
    struct pool_layer *layers = calloc(stream->n_weights + 1, sizeof *layers);
    if (layers == NULL) {
        return -ENOMEM;
    }
    unsigned n_parts;
    int n_layers = collect_layers(stream, i, layers, &n_parts);
    int error = n_layers < 0 ? n_layers
                             : pool_create(&stream->pools[i], stream->source,
                                           stream->policy, layers, (unsigned)n_layers,
                                           n_parts, stream->pool_records[i]);
    free(layers);
    if (error != 0) {
        return error;
    }
    for (unsigned k = 0; k < stream->n_weights; k++) {
        const struct stream_weight *w = &stream->described[k];
        if (w->block >= 0 && w->pool == i) {
            stream->weights[k].layer->pool = stream->pools[i];
            stream->weights[k].layer->n_parts = n_parts;
        }
    }
    return 0;
}

/* Tell each streamed layer which one follows. */
static void
link_layers(struct stream *stream)
{
    const struct callback_layer *next = NULL;
    for (unsigned i = CALLBACK_MAX_BLOCKS; i-- > 0;) {
        if (stream->callback.layer_of[i] != NULL) {
            stream->layers[i].next = next;
            next = &stream->layers[i];
        }
    }
}

int
stream_start(struct stream *stream)
{
    vfile_destroy(stream->vfile);
    stream->vfile = NULL;
    for (unsigned i = 0; i < stream->n_weights; i++) {
        struct callback_weight *weight = &stream->weights[i];
        if (weight->tensor == NULL) {
            return -EINVAL;
        }
        weight->tensor->data = weight->address;
        weight->view = *weight->tensor;
        weight->view.extra = NULL;
    }
    int error = start_ring(stream);
    for (unsigned i = 0; i < stream->n_pools && error == 0; i++) {
        error = start_pool(stream, i);
    }
    link_layers(stream);
    return error;
}

struct callback *
stream_callback(struct stream *stream)
{
    return &stream->callback;
}

struct callback_fault
stream_finish(struct stream *stream)
{
    return callback_finish(&stream->callback);
}

size_t
stream_n_experts(const struct stream *stream)
{
    size_t n = 0;
    for (unsigned i = 0; i < stream->n_pools; i++) {
        n += stream->pools[i] == NULL ? 0 : pool_n_experts(stream->pools[i]);
    }
    return n;
}

void
stream_get_uses(const struct stream *stream, uint32_t *uses)
{
    for (unsigned i = 0; i < stream->n_pools; i++) {
        if (stream->pools[i] != NULL) {
            pool_get_uses(stream->pools[i], uses);
            uses += pool_n_experts(stream->pools[i]);
        }
    }
}

size_t
stream_fill(struct stream *stream, const uint32_t *experts, size_t n)
{
    size_t n_read = 0;
    uint32_t first = 0;
    for (unsigned k = 0; k < stream->n_pools && stream->pools[k] != NULL; k++) {
        uint32_t n_experts = (uint32_t)pool_n_experts(stream->pools[k]);
        uint32_t in_pool[STREAM_MAX_FILL];
        size_t n_in_pool = 0;
        for (size_t i = 0; i < n && i < STREAM_MAX_FILL; i++) {
            if (experts[i] - first < n_experts) {
                in_pool[n_in_pool++] = experts[i] - first;
            }
        }
        n_read += pool_fill(stream->pools[k], in_pool, n_in_pool);
        first += n_experts;
    }
    return n_read;
}

int
stream_resize(struct stream *stream, unsigned pool, size_t n_records)
{
    bool is_there = pool < stream->n_pools && stream->pools[pool] != NULL;
    return is_there ? pool_resize(stream->pools[pool], n_records) : -EINVAL;
}

struct stream_stats
stream_get_stats(const struct stream *stream)
{
    struct stream_stats stats = {
        .reads = readers_get_stats(stream->source->readers),
        .resident_bytes = stream->ring_bytes,
    };
    for (unsigned i = 0; i < stream->n_pools; i++) {
        if (stream->pools[i] != NULL) {
            const struct pool_stats *pool = pool_get_stats(stream->pools[i]);
            stats.n_hits += atomic_load(&pool->n_hits);
            stats.n_misses += atomic_load(&pool->n_misses);
            stats.n_evictions += atomic_load(&pool->n_evictions);
            stats.n_guesses += atomic_load(&pool->n_guesses);
            stats.n_useful += atomic_load(&pool->n_useful);
            stats.n_late += atomic_load(&pool->n_late);
            stats.stall_ns += atomic_load(&pool->stall_ns);
            stats.resident_bytes += pool_resident_bytes(stream->pools[i]);
        }
    }
    if (stream->ring != NULL) {
        const struct ring_stats *ring = ring_get_stats(stream->ring);
        stats.n_ahead = atomic_load(&ring->n_ahead);
        stats.n_demand = atomic_load(&ring->n_demand);
        stats.stall_ns += atomic_load(&ring->stall_ns);
    }
    return stats;
}

void
stream_close(struct stream *stream)
{
    if (stream == NULL) {
        return;
    }
    vfile_destroy(stream->vfile);
    ring_destroy(stream->ring);
    for (unsigned i = 0; stream->pools != NULL && i < stream->n_pools; i++) {
        pool_destroy(stream->pools[i]);
    }
    callback_deinit(&stream->callback);
    buftype_deinit(&stream->buftype);
    source_close(stream->source);
    free(stream->pools);
    free(stream->layers);
    free(stream->weights);
    free(stream->pool_records);
    free(stream->described);
    free(stream->extents);
    free(stream);
}
