#include "buftype.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ggml's own CPU buffers: TENSOR_ALIGNMENT in ggml-backend.cpp is 32. */
#define ALIGNMENT ((size_t)64)

static const char *
get_name(struct ggml_backend_buffer_type *type)
{
    (void)type;
    return "headrace";
}

static size_t
get_alignment(struct ggml_backend_buffer_type *type)
{
    (void)type;
    return ALIGNMENT;
}

/* Operations on host tensors run on the CPU and may read them: through our views. */
static bool
is_host(struct ggml_backend_buffer_type *type)
{
    (void)type;
    return true;
}

static void
free_buffer(struct ggml_backend_buffer *buffer)
{
    struct pages *pages = buffer->context;
    pages_unmap(pages);
    free(pages);
}

static void *
get_base(struct ggml_backend_buffer *buffer)
{
    const struct pages *pages = buffer->context;
    return pages->data;
}

static int
init_tensor(struct ggml_backend_buffer *buffer, struct ggml_tensor *tensor)
{
    struct buftype *buftype = buffer->type->context;
    if (tensor->view_src != NULL) {
        return GGML_STATUS_SUCCESS;
    }
    return buftype->bind(buftype->owner, tensor) ? GGML_STATUS_SUCCESS
                                                 : GGML_STATUS_ALLOC_FAILED;
}

/* Nobody writes to or reads from a streamed weight but through a view; ggml wants the
 * functions to be there. */
static void
memset_tensor(struct ggml_backend_buffer *buffer, struct ggml_tensor *tensor,
              uint8_t value, size_t offset, size_t size)
{
    (void)buffer;
    memset((unsigned char *)tensor->data + offset, value, size);
}

static void
set_tensor(struct ggml_backend_buffer *buffer, struct ggml_tensor *tensor,
           const void *data, size_t offset, size_t size)
{
    (void)buffer;
    memcpy((unsigned char *)tensor->data + offset, data, size);
}

static void
get_tensor(struct ggml_backend_buffer *buffer, const struct ggml_tensor *tensor,
           void *data, size_t offset, size_t size)
{
    (void)buffer;
    memcpy(data, (const unsigned char *)tensor->data + offset, size);
}

static void
clear(struct ggml_backend_buffer *buffer, uint8_t value)
{
    (void)buffer;
    (void)value;
}

static struct ggml_backend_buffer *
alloc_buffer(struct ggml_backend_buffer_type *type, size_t size)
{
    static const struct ggml_backend_buffer_i functions = {
        .free_buffer = free_buffer,
        .get_base = get_base,
        .init_tensor = init_tensor,
        .memset_tensor = memset_tensor,
        .set_tensor = set_tensor,
        .get_tensor = get_tensor,
        .clear = clear,
    };
    const struct buftype *buftype = type->context;
    struct pages *pages = malloc(sizeof *pages);
    if (pages == NULL || pages_reserve(pages, size) != 0) {
        free(pages);
        return NULL;
    }
    struct ggml_backend_buffer *buffer =
        buftype->ggml->buffer_init(type, functions, pages, size);
    if (buffer == NULL) {
        pages_unmap(pages);
        free(pages);
    }
    return buffer;
}

int
buftype_check(const struct ggml_functions *ggml)
{
    if (strcmp(ggml->version(), GGML_LAYOUT_VERSION) != 0) {
        return -ENOTSUP;
    }
    struct ggml_backend_buffer_type *cpu = ggml->cpu_buffer_type();
    const char *name = cpu->iface.get_name(cpu);
    bool is_known = strcmp(name, "CPU") == 0 && ggml->buffer_type_name(cpu) == name
                    && cpu->iface.is_host != NULL && cpu->iface.is_host(cpu);
    return is_known ? 0 : -ENOTSUP;
}

int
buftype_init(struct buftype *buftype, const struct ggml_functions *ggml,
             size_t max_bytes, buftype_bind bind, void *owner)
{
    *buftype = (struct buftype){.ggml = ggml, .bind = bind, .owner = owner};
    buftype->type.iface = (struct ggml_backend_buffer_type_i){
        .get_name = get_name,
        .alloc_buffer = alloc_buffer,
        .get_alignment = get_alignment,
        .is_host = is_host,
    };
    buftype->type.device = ggml->cpu_buffer_type()->device;
    buftype->type.context = buftype;
    return pages_map_sink(&buftype->sink, max_bytes);
}

void
buftype_deinit(struct buftype *buftype)
{
    pages_unmap(&buftype->sink);
}
