#include "callback_private.h"

#include <stdlib.h>

/* llama-graph.cpp, build_moe_ffn */
static const char logits_prefix[] = "ffn_moe_logits-";
/* what each model's graph calls the output of a layer */
static const char output_prefix[] = "l_out-";

/* From so many choices for each expert on, nearly all are chosen by one token or another. */
#define ALL_CHOSEN 3u

static bool
is_host_f32(const struct ggml_tensor *tensor)
{
    return tensor->type == GGML_TYPE_F32 && tensor->buffer != NULL
           && tensor->buffer->type->iface.is_host != NULL
           && tensor->buffer->type->iface.is_host(tensor->buffer->type)
           && tensor->nb[0] == sizeof(float)
           && tensor->nb[1] == (size_t)tensor->ne[0] * sizeof(float);
}

void
callback_note_router(struct callback *callback, const struct ggml_tensor *node)
{
    struct callback_layer *layer = callback_layer_of(callback, node, logits_prefix);
    if (layer == NULL) {
        return;
    }
    const struct ggml_tensor *router = node->src[0];
    const struct ggml_tensor *state = node->src[1];
    bool is_known = node->op == GGML_OP_MUL_MAT && is_host_f32(router)
                    && is_host_f32(state) && router->ne[0] == state->ne[0]
                    && router->ne[1] == (int64_t)layer->n_experts;
    layer->router = is_known ? router : NULL;
    layer->state = is_known ? state : NULL;
    const struct ggml_tensor *norm = state->op == GGML_OP_MUL ? state->src[1] : NULL;
    bool is_norm = is_known && norm != NULL && is_host_f32(norm)
                   && norm->ne[0] == router->ne[0] && norm->ne[1] == 1;
    layer->norm = is_norm ? norm : NULL;
}

/* Have the experts read that layer is likely to choose for the tokens of state, which the
 * weights of norm, if any, are to be applied to. */
static void
guess(struct callback *callback, const struct callback_layer *layer,
      const struct ggml_tensor *state, const struct ggml_tensor *norm, size_t n_guesses)
{
    const struct ggml_tensor *router = layer->router;
    if (n_guesses == 0 || router == NULL || state == NULL || !is_host_f32(state)
        || state->ne[0] != router->ne[0] || state->ne[1] > CALLBACK_MAX_GUESS_TOKENS) {
        return;
    }
    size_t n_inputs = (size_t)state->ne[0];
    if (norm != NULL && callback->n_state < n_inputs) {
        free(callback->state);
        callback->state = calloc(n_inputs, sizeof *callback->state);
        callback->n_state = callback->state == NULL ? 0 : n_inputs;
        if (callback->state == NULL) {
            return;
        }
    }
    int32_t experts[LOOKAHEAD_MAX_EXPERTS];
    for (int64_t i = 0; i < state->ne[1]; i++) {
        const float *row = (const float *)state->data + (size_t)i * n_inputs;
        if (norm != NULL) {
            for (size_t k = 0; k < n_inputs; k++) {
                callback->state[k] = row[k] * ((const float *)norm->data)[k];
            }
            row = callback->state;
        }
        size_t n = lookahead(router->data, n_inputs, layer->n_experts, row, n_guesses,
                             experts);
        pool_guess(layer->pool, layer->pool_layer, experts, n);
    }
}

void
callback_guess_early(struct callback *callback, const struct callback_layer *layer,
                     size_t n_tokens)
{
    const struct callback_layer *next = layer->next;
    size_t n_used = callback->n_used;
    if (next != NULL && n_used * n_tokens >= (size_t)ALL_CHOSEN * next->n_experts) {
        pool_guess_all(next->pool, next->pool_layer);
    } else if (next != NULL) {
        guess(callback, next, layer->state, NULL,
              lookahead_n_early(&callback->trial, n_used));
    }
}

/* Return the layer that is guessed for when node, the output of the one before it, is
 * computed: only attention is missing then. NULL: none is. */
static const struct callback_layer *
guessed_after(const struct callback *callback, const struct ggml_tensor *node)
{
    if (!callback->is_short || lookahead_n_late(&callback->trial, 1) == 0) {
        return NULL;
    }
    const struct callback_layer *layer = callback_layer_of(callback, node, output_prefix);
    const struct callback_layer *next = layer == NULL ? NULL : layer->next;
    bool is_known = next != NULL && layer == callback->at_hand && next->norm != NULL;
    return is_known ? next : NULL;
}

bool
callback_guesses_after(const struct callback *callback, const struct ggml_tensor *node)
{
    return guessed_after(callback, node) != NULL;
}

void
callback_guess_late(struct callback *callback, const struct ggml_tensor *node)
{
    const struct callback_layer *layer = guessed_after(callback, node);
    if (layer != NULL) {
        guess(callback, layer, node, layer->norm,
              lookahead_n_late(&callback->trial, callback->n_used));
    }
}
