/* Those parts of ggml's private layout that streaming needs, declared once.
 *
 * Of ggml 0.25.3, from ggml/include/ggml.h and ggml/src/ggml-backend-impl.h, which are
 * not installed with llama-cpp-python. Whoever uses it checks ggml_version() first, and
 * that a buffer type known to ggml is found through it (see buftype_check).
 */

#ifndef HEADRACE_GGML_LAYOUT_H
#define HEADRACE_GGML_LAYOUT_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GGML_LAYOUT_VERSION "0.25.3"

#define GGML_MAX_DIMS 4
#define GGML_MAX_NAME 64
#define GGML_MAX_OP_PARAMS 64
#define GGML_MAX_SRC 10

enum { GGML_TYPE_F32 = 0, GGML_TYPE_I32 = 26 };

enum {
    GGML_OP_NONE = 0,
    GGML_OP_MUL = 7,
    GGML_OP_MUL_MAT = 29,
    GGML_OP_MUL_MAT_ID = 30,
    GGML_OP_RESHAPE = 36,
    GGML_OP_VIEW = 37,
    GGML_OP_PERMUTE = 38,
    GGML_OP_TRANSPOSE = 39,
};

enum { GGML_TENSOR_FLAG_COMPUTE = 16 };

enum { GGML_STATUS_ALLOC_FAILED = -2, GGML_STATUS_SUCCESS = 0 };

struct ggml_backend_buffer;
struct ggml_backend_buffer_type;

struct ggml_tensor {
    int type;
    struct ggml_backend_buffer *buffer;
    int64_t ne[GGML_MAX_DIMS];  /* elements */
    size_t nb[GGML_MAX_DIMS];   /* strides in bytes */
    int op;
    int32_t op_params[GGML_MAX_OP_PARAMS / sizeof(int32_t)];
    int32_t flags;
    struct ggml_tensor *src[GGML_MAX_SRC];
    struct ggml_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[GGML_MAX_NAME];
    void *extra;
    char padding[8];
};

static_assert(sizeof(struct ggml_tensor) == 336, "as in ggml 0.25.3");
static_assert(offsetof(struct ggml_tensor, src) == 152, "as in ggml 0.25.3");
static_assert(offsetof(struct ggml_tensor, data) == 248, "as in ggml 0.25.3");
static_assert(offsetof(struct ggml_tensor, extra) == 320, "as in ggml 0.25.3");

struct ggml_backend_buffer_type_i {
    const char *(*get_name)(struct ggml_backend_buffer_type *type);
    struct ggml_backend_buffer *(*alloc_buffer)(struct ggml_backend_buffer_type *type,
                                                size_t size);
    size_t (*get_alignment)(struct ggml_backend_buffer_type *type);
    size_t (*get_max_size)(struct ggml_backend_buffer_type *type);
    size_t (*get_alloc_size)(struct ggml_backend_buffer_type *type,
                             const struct ggml_tensor *tensor);
    bool (*is_host)(struct ggml_backend_buffer_type *type);
};

struct ggml_backend_buffer_type {
    struct ggml_backend_buffer_type_i iface;
    void *device;
    void *context;
};

struct ggml_backend_buffer_i {
    void (*free_buffer)(struct ggml_backend_buffer *buffer);
    void *(*get_base)(struct ggml_backend_buffer *buffer);
    int (*init_tensor)(struct ggml_backend_buffer *buffer, struct ggml_tensor *tensor);
    void (*memset_tensor)(struct ggml_backend_buffer *buffer, struct ggml_tensor *tensor,
                          uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(struct ggml_backend_buffer *buffer, struct ggml_tensor *tensor,
                       const void *data, size_t offset, size_t size);
    void (*get_tensor)(struct ggml_backend_buffer *buffer,
                       const struct ggml_tensor *tensor, void *data, size_t offset,
                       size_t size);
    void (*set_tensor_2d)(struct ggml_backend_buffer *buffer, struct ggml_tensor *tensor,
                          const void *data, size_t offset, size_t size, size_t n_copies,
                          size_t stride_tensor, size_t stride_data);
    void (*get_tensor_2d)(struct ggml_backend_buffer *buffer,
                          const struct ggml_tensor *tensor, void *data, size_t offset,
                          size_t size, size_t n_copies, size_t stride_tensor,
                          size_t stride_data);
    bool (*cpy_tensor)(struct ggml_backend_buffer *buffer, const struct ggml_tensor *src,
                       struct ggml_tensor *dst);
    void (*clear)(struct ggml_backend_buffer *buffer, uint8_t value);
    void (*reset)(struct ggml_backend_buffer *buffer);
};

struct ggml_backend_buffer {
    struct ggml_backend_buffer_i iface;
    struct ggml_backend_buffer_type *type;
    void *context;
    size_t size;
    int usage;
};

/* What we call of ggml: addresses in its libraries, found by whoever loaded them. */
struct ggml_functions {
    const char *(*version)(void);
    struct ggml_backend_buffer_type *(*cpu_buffer_type)(void);
    const char *(*buffer_type_name)(struct ggml_backend_buffer_type *type);
    struct ggml_backend_buffer *(*buffer_init)(struct ggml_backend_buffer_type *type,
                                               struct ggml_backend_buffer_i iface,
                                               void *context, size_t size);
    void (*tensor_get)(const struct ggml_tensor *tensor, void *data, size_t offset,
                       size_t size);
};

#endif
