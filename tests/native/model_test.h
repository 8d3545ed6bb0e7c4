/* A small model in two files: where its weights lie, and how it is loaded through a
 * stream. Included once by a program, after ggml_test.h. */

#include <fcntl.h>

#include "stream.h"

#define MAX_BLOCKS 4u
#define N_INPUTS 64  /* of a router */
#define FILE_BYTES ((size_t)2 * 1024 * 1024)
#define HEADER_BYTES ((size_t)1312)

enum { TRUNK, GATE, UP, DOWN, N_KINDS };

struct weight {
    struct ggml_tensor shape;
    unsigned file;
    uint64_t offset;
    uint64_t start;  /* in the virtual file */
};

/* Weights of each block are those of the enum, in its order; all but the first are
 * streamed. */
struct model {
    unsigned n_blocks;
    unsigned n_experts;  /* 0: dense */
    unsigned n_used;
    unsigned n_in_pool;  /* blocks of pool 0; those of pool 1 follow */
    struct weight weights[MAX_BLOCKS * N_KINDS];
    uint64_t size;       /* of the virtual file */
    uint64_t n_trunk_bytes;
};

struct loaded {
    const struct model *model;
    struct stream *stream;
    struct ggml_tensor tensors[MAX_BLOCKS * N_KINDS];
    struct ggml_backend_buffer *buffers[2];  /* of the trunk, and of what is streamed */
    void *sink;                              /* what is streamed is written to at load */
};

/* Overwrite a weight in its file by numbers that a router may have. */
static inline void
write_router(const struct weight *weight)
{
    struct made_file *file = &files[weight->file];
    float *values = (float *)(void *)(file->content + weight->offset);
    size_t len = n_bytes(&weight->shape);
    for (size_t i = 0; i < len / sizeof *values; i++) {
        values[i] = (float)next_random(2001) / 1000 - 1;
    }
    int fd = open(file->path, O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, values, len, (off_t)weight->offset) == (ssize_t)len);
    CHECK(close(fd) == 0);
}

/* Make model's files, with odd blocks in the second. */
static inline void
make_model(struct model *model)
{
    static const char *const kinds[] = {"gate_inp", "gate", "up", "down"};
    uint64_t ends[] = {1312, 4096};
    make_file(0, FILE_BYTES);
    make_file(1, FILE_BYTES);
    model->size = HEADER_BYTES;
    for (unsigned i = 0; i < model->n_blocks * N_KINDS; i++) {
        struct weight *weight = &model->weights[i];
        unsigned block = i / N_KINDS, kind = i % N_KINDS;
        bool is_expert = model->n_experts > 0 && kind != TRUNK;
        int64_t n_rows = is_expert ? 20 : 350 + 16 * (int64_t)block;
        n_rows += 5 * (block >= model->n_in_pool);
        char name[GGML_MAX_NAME];
        (void)snprintf(name, sizeof name, "blk.%u.ffn_%s%s.weight", block, kinds[kind],
                       is_expert ? "_exps" : "");
        set_shape(&weight->shape, name, kind == TRUNK ? N_INPUTS : 97,
                  kind == TRUNK ? 12 : n_rows, is_expert ? model->n_experts : 1);
        uint64_t len = n_bytes(&weight->shape);
        weight->file = block % 2;
        weight->offset = ends[weight->file];
        weight->start = model->size;
        ends[weight->file] += (len + 31) / 32 * 32 + 32;
        model->size += (len + 31) / 32 * 32;
        CHECK(ends[weight->file] <= FILE_BYTES);
        if (kind == TRUNK) {
            write_router(weight);
            model->n_trunk_bytes += len;
        }
    }
}

/* Return the tensors of model in memory. */
static inline void
make_resident(const struct model *model, struct ggml_tensor *tensors)
{
    for (unsigned i = 0; i < model->n_blocks * N_KINDS; i++) {
        const struct weight *weight = &model->weights[i];
        tensors[i] = weight->shape;
        tensors[i].data = files[weight->file].content + weight->offset;
    }
}

static inline int
open_model(struct loaded *loaded, const struct model *model, struct stream_config config,
           unsigned *failed)
{
    static const unsigned char header[HEADER_BYTES];
    const char *paths[] = {files[0].path, files[1].path};
    struct vfile_extent extents[1 + MAX_BLOCKS * N_KINDS] = {
        {0, HEADER_BYTES, VFILE_MEMORY, header, 0, 0}};
    struct stream_weight streamed[MAX_BLOCKS * N_KINDS] = {0};
    unsigned n_streamed = 0;
    for (unsigned i = 0; i < model->n_blocks * N_KINDS; i++) {
        const struct weight *w = &model->weights[i];
        size_t len = n_bytes(&w->shape);
        enum vfile_kind kind = i % N_KINDS == TRUNK ? VFILE_FILE : VFILE_STREAMED;
        extents[i + 1] =
            (struct vfile_extent){w->start, len, kind, NULL, w->file, w->offset};
        if (kind == VFILE_STREAMED) {
            int block = model->n_experts > 0 ? (int)(i / N_KINDS) : -1;
            unsigned pool = i / N_KINDS >= model->n_in_pool;
            struct stream_weight *s = &streamed[n_streamed++];
            *s = (struct stream_weight){"", w->file, w->offset, len, block,
                                        model->n_experts, pool};
            memcpy(s->name, w->shape.name, sizeof s->name);
        }
    }
    config.ggml = config.ggml == NULL ? &ggml : config.ggml;
    config.paths = config.paths == NULL ? paths : config.paths;
    config.n_files = 2;
    config.extents = extents;
    config.n_extents = 1 + model->n_blocks * N_KINDS;
    config.weights = streamed;
    config.n_weights = n_streamed;
    *loaded = (struct loaded){.model = model};
    return stream_open(&loaded->stream, &config, failed);
}

/* Place and read all tensors as llama.cpp's loader does. */
static inline void
read_model(struct loaded *loaded)
{
    const struct model *model = loaded->model;
    struct ggml_tensor *placed[2][MAX_BLOCKS * N_KINDS];
    size_t n[2] = {0};
    for (unsigned i = 0; i < model->n_blocks * N_KINDS; i++) {
        loaded->tensors[i] = model->weights[i].shape;
        unsigned is_streamed = i % N_KINDS != TRUNK;
        placed[is_streamed][n[is_streamed]++] = &loaded->tensors[i];
    }
    loaded->buffers[0] = place(&cpu_type, placed[0], n[0]);
    loaded->buffers[1] = place(stream_buffer_type(loaded->stream), placed[1], n[1]);
    CHECK(loaded->buffers[1] != NULL);
    loaded->sink = loaded->tensors[GATE].data;
    FILE *file = stream_file(loaded->stream);
    for (unsigned i = 0; i < model->n_blocks * N_KINDS; i++) {
        const struct weight *weight = &model->weights[i];
        size_t len = n_bytes(&weight->shape);
        CHECK(fseeko(file, (off_t)weight->start, SEEK_SET) == 0);
        CHECK(fread(loaded->tensors[i].data, 1, len, file) == len);
        const unsigned char *expected = files[weight->file].content + weight->offset;
        CHECK(i % N_KINDS != TRUNK
              || memcmp(loaded->tensors[i].data, expected, len) == 0);
    }
    CHECK(stream_load_fault(loaded->stream).error == 0);
}

static inline void
load(struct loaded *loaded, const struct model *model, struct stream_config config)
{
    unsigned failed;
    CHECK(open_model(loaded, model, config, &failed) == 0);
    read_model(loaded);
    CHECK(stream_start(loaded->stream) == 0);
}

static inline void
unload(struct loaded *loaded)
{
    for (unsigned i = 0; i < 2; i++) {
        if (loaded->buffers[i] != NULL) {
            buffer_free(loaded->buffers[i]);
        }
    }
    stream_close(loaded->stream);
    CHECK(loaded->sink == NULL || !is_mapped(loaded->sink));
}
