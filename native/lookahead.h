/* Which experts the next layer is likely to choose: its router applied to what is known.
 *
 * In: a router's weights and the hidden state of the layer before. Out: experts, the
 * likeliest first. A guess only: the state will change by a layer's attention and
 * experts before the router sees it.
 */

#ifndef HEADRACE_LOOKAHEAD_H
#define HEADRACE_LOOKAHEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LOOKAHEAD_MAX_EXPERTS 1024u

/* Put the n_best experts whose rows of router (n_experts rows of n_inputs, back to back)
 * have the largest products with state into experts; at most LOOKAHEAD_MAX_EXPERTS rows.
 * Returns how many there are: less if products are not finite. */
size_t lookahead(const float *router, size_t n_inputs, size_t n_experts,
                 const float *state, size_t n_best, int32_t *experts);

enum lookahead_mode { LOOKAHEAD_OFF, LOOKAHEAD_MEASURED, LOOKAHEAD_ON };

/* When to guess the experts of a layer: never; late, from the output of the layer before,
 * three of four that a token uses; or also early, when the layer before has chosen, half
 * of them: a worse guess with more time to read. The least likely ones are left out: they
 * cost a read each and turn out right too seldom. */
enum lookahead_level { LOOKAHEAD_NEVER, LOOKAHEAD_LATE, LOOKAHEAD_EARLY };

#define LOOKAHEAD_N_LEVELS 3u

/* The level at which passes are fastest: measured, if mode says so. */
struct lookahead_trial {
    enum lookahead_mode mode;
    uint64_t sum_ns[LOOKAHEAD_N_LEVELS];  /* of passes at each level */
    uint64_t n_passes[LOOKAHEAD_N_LEVELS];
    uint64_t n_left;                      /* passes until the next decision */
    unsigned level;
    bool is_trying;
};

/* Note the time of a pass at the level at hand and choose that of the next one. */
void lookahead_next(struct lookahead_trial *trial, uint64_t pass_ns);

/* Return the experts to guess early, and late, where a token uses n_used. */
size_t lookahead_n_early(const struct lookahead_trial *trial, size_t n_used);
size_t lookahead_n_late(const struct lookahead_trial *trial, size_t n_used);

#endif
