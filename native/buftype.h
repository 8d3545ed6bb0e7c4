/* A ggml buffer type whose tensors have addresses but no memory.
 *
 * In: tensors that llama.cpp's loader places in it. Out: each is handed to the owner and
 * pointed at a sink while the model is loaded, so that the loader may write to it; then
 * at addresses that nobody may touch, so that an operation on a weight that was not
 * streamed crashes instead of computing with anything else. Knows no files.
 */

#ifndef HEADRACE_BUFTYPE_H
#define HEADRACE_BUFTYPE_H

#include "ggml_layout.h"
#include "pages.h"

/* Called for each tensor placed: sets tensor->extra. False: it is not one of ours. */
typedef bool (*buftype_bind)(void *owner, struct ggml_tensor *tensor);

/* Fields belong to buftype.c, but for type. */
struct buftype {
    struct ggml_backend_buffer_type type;  /* for llama_model_tensor_buft_override */
    const struct ggml_functions *ggml;
    buftype_bind bind;
    void *owner;
    struct pages sink;
};

/* Return 0 if ggml is the version whose layout we know, else -ENOTSUP. */
int buftype_check(const struct ggml_functions *ggml);

/* Set up a type whose tensors have at most max_bytes; it stays where it is until the
 * model is freed. Returns 0 or -errno. */
int buftype_init(struct buftype *buftype, const struct ggml_functions *ggml,
                 size_t max_bytes, buftype_bind bind, void *owner);

/* Return whether tensor is placed in buftype, itself or as a view. */
static inline bool
buftype_holds(const struct buftype *buftype, const struct ggml_tensor *tensor)
{
    return tensor->buffer != NULL && tensor->buffer->type == &buftype->type;
}

/* Free what init made; the model was freed before. */
void buftype_deinit(struct buftype *buftype);

#endif
