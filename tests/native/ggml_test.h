/* As much of ggml as it takes to load a model: what of it the core calls, a buffer type
 * of its own, and tensors placed in buffers as llama.cpp's loader places them. Included
 * once by a program, after core_test.h. */

#include <string.h>
#include <sys/mman.h>

#include "ggml_layout.h"

static inline size_t
n_bytes(const struct ggml_tensor *tensor)
{
    size_t n = sizeof(float);  /* of one element: F32 or I32 */
    for (unsigned i = 0; i < GGML_MAX_DIMS; i++) {
        n += (size_t)(tensor->ne[i] - 1) * tensor->nb[i];
    }
    return n;
}

/* Give tensor a name and a shape of elements that lie back to back. */
static inline void
set_shape(struct ggml_tensor *tensor, const char *name, int64_t n0, int64_t n1,
          int64_t n2)
{
    *tensor = (struct ggml_tensor){.type = GGML_TYPE_F32, .ne = {n0, n1, n2, 1}};
    (void)snprintf(tensor->name, sizeof tensor->name, "%s", name);
    tensor->nb[0] = sizeof(float);
    for (unsigned i = 1; i < GGML_MAX_DIMS; i++) {
        tensor->nb[i] = tensor->nb[i - 1] * (size_t)tensor->ne[i - 1];
    }
}

static inline const char *
version(void)
{
    return GGML_LAYOUT_VERSION;
}

static inline struct ggml_backend_buffer *
buffer_init(struct ggml_backend_buffer_type *type, struct ggml_backend_buffer_i iface,
            void *context, size_t size)
{
    struct ggml_backend_buffer *buffer = malloc(sizeof *buffer);
    CHECK(buffer != NULL);
    *buffer = (struct ggml_backend_buffer){iface, type, context, size, 0};
    return buffer;
}

static inline void
buffer_free(struct ggml_backend_buffer *buffer)
{
    buffer->iface.free_buffer(buffer);
    free(buffer);
}

static inline void
tensor_get(const struct ggml_tensor *tensor, void *data, size_t offset, size_t size)
{
    struct ggml_backend_buffer *buffer =
        tensor->view_src != NULL ? tensor->view_src->buffer : tensor->buffer;
    CHECK(offset + size <= n_bytes(tensor));
    buffer->iface.get_tensor(buffer, tensor, data, offset, size);
}

static inline const char *
buffer_type_name(struct ggml_backend_buffer_type *type)
{
    return type->iface.get_name(type);
}

/* The buffer type of plain memory. */

static inline const char *
cpu_name(struct ggml_backend_buffer_type *type)
{
    (void)type;
    return "CPU";
}

static inline bool
cpu_is_host(struct ggml_backend_buffer_type *type)
{
    (void)type;
    return true;
}

static inline size_t
cpu_alignment(struct ggml_backend_buffer_type *type)
{
    (void)type;
    return 32;
}

static inline void
cpu_free(struct ggml_backend_buffer *buffer)
{
    free(buffer->context);
}

static inline void *
cpu_base(struct ggml_backend_buffer *buffer)
{
    return buffer->context;
}

static inline void
cpu_get(struct ggml_backend_buffer *buffer, const struct ggml_tensor *tensor, void *data,
        size_t offset, size_t size)
{
    (void)buffer;
    memcpy(data, (const unsigned char *)tensor->data + offset, size);
}

static inline struct ggml_backend_buffer *
cpu_alloc(struct ggml_backend_buffer_type *type, size_t size)
{
    struct ggml_backend_buffer_i iface = {
        .free_buffer = cpu_free, .get_base = cpu_base, .get_tensor = cpu_get};
    void *data = aligned_alloc(32, (size + 31) / 32 * 32);
    CHECK(data != NULL);
    return buffer_init(type, iface, data, size);
}

static struct ggml_backend_buffer_type cpu_type = {
    .iface = {.get_name = cpu_name, .alloc_buffer = cpu_alloc,
              .get_alignment = cpu_alignment, .is_host = cpu_is_host},
};

static inline struct ggml_backend_buffer_type *
cpu_buffer_type(void)
{
    return &cpu_type;
}

static const struct ggml_functions ggml = {
    .version = version,
    .cpu_buffer_type = cpu_buffer_type,
    .buffer_type_name = buffer_type_name,
    .buffer_init = buffer_init,
    .tensor_get = tensor_get,
};

/* Put tensors into one new buffer of a type. Returns it, or NULL if one was refused. */
static inline struct ggml_backend_buffer *
place(struct ggml_backend_buffer_type *type, struct ggml_tensor *const *tensors, size_t n)
{
    size_t align = type->iface.get_alignment(type);
    size_t size = 0;
    for (size_t i = 0; i < n; i++) {
        size += (n_bytes(tensors[i]) + align - 1) / align * align;
    }
    struct ggml_backend_buffer *buffer = type->iface.alloc_buffer(type, size);
    CHECK(buffer != NULL);
    unsigned char *at = buffer->iface.get_base(buffer);
    for (size_t i = 0; i < n; i++) {
        tensors[i]->buffer = buffer;
        tensors[i]->data = at;
        at += (n_bytes(tensors[i]) + align - 1) / align * align;
        if (buffer->iface.init_tensor != NULL
            && buffer->iface.init_tensor(buffer, tensors[i]) != GGML_STATUS_SUCCESS) {
            buffer_free(buffer);
            return NULL;
        }
    }
    return buffer;
}

/* Return whether a byte can be read. */
static inline bool
is_there(const void *data)
{
    int ends[2];
    CHECK(pipe(ends) == 0);
    ssize_t n = write(ends[1], data, 1);
    CHECK(n == 1 || errno == EFAULT);
    CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
    return n == 1;
}

/* Return whether an address that was mapped still is. */
static inline bool
is_mapped(void *data)
{
    unsigned char is_resident;
    return mincore(data, 1, &is_resident) == 0;
}
