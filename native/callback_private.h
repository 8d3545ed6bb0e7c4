/* What callback.c and callback_guess.c share. */

#ifndef HEADRACE_CALLBACK_PRIVATE_H
#define HEADRACE_CALLBACK_PRIVATE_H

#include "callback.h"

/* More tokens than this choose so many experts that guesses of all would be in the way. */
#define CALLBACK_MAX_GUESS_TOKENS 4u

/* Return the streamed layer of the node that prefix and a block's number name, or NULL. */
struct callback_layer *callback_layer_of(const struct callback *callback,
                                         const struct ggml_tensor *node,
                                         const char *prefix);

/* Note what a layer chooses its experts by, if node does that. */
void callback_note_router(struct callback *callback, const struct ggml_tensor *node);

/* Have experts read for the layer behind layer, which has just chosen for n_tokens: what
 * it chose by tells something. */
void callback_guess_early(struct callback *callback, const struct callback_layer *layer,
                          size_t n_tokens);

/* Return whether node is the output of a layer that is guessed after. */
bool callback_guesses_after(const struct callback *callback,
                            const struct ggml_tensor *node);

/* Have experts read for the next layer if node, which is computed, is such an output. */
void callback_guess_late(struct callback *callback, const struct ggml_tensor *node);

#endif
