#include "lookahead.h"

#include <math.h>
#include <string.h>

/* Passes of each level that are compared, in turns, and passes between comparisons. */
#define TRIAL_PASSES 16u
#define REST_PASSES 480u
/* In turns of four: neighbours are alike, and a guess has time to be of use. */
#define TURN_PASSES 4u

typedef float floats __attribute__((vector_size(16)));
#define N_LANES (sizeof(floats) / sizeof(float))

/* Return the product of two rows; any order of additions will do for a guess. */
static float
dot(const float *a, const float *b, size_t n)
{
    floats sums[4] = {{0}};
    size_t i = 0;
    for (; i + 4 * N_LANES <= n; i += 4 * N_LANES) {
        for (size_t k = 0; k < 4; k++) {
            floats x, y;
            memcpy(&x, a + i + k * N_LANES, sizeof x);
            memcpy(&y, b + i + k * N_LANES, sizeof y);
            sums[k] += x * y;
        }
    }
    floats total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = (total[0] + total[1]) + (total[2] + total[3]);
    for (; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

size_t
lookahead(const float *router, size_t n_inputs, size_t n_experts, const float *state,
          size_t n_best, int32_t *experts)
{
    float scores[LOOKAHEAD_MAX_EXPERTS];
    if (n_experts > LOOKAHEAD_MAX_EXPERTS) {
        return 0;
    }
    for (size_t i = 0; i < n_experts; i++) {
        scores[i] = dot(router + i * n_inputs, state, n_inputs);
        scores[i] = isfinite(scores[i]) ? scores[i] : -INFINITY;
    }
    size_t n = 0;
    for (; n < n_best && n < n_experts; n++) {
        size_t best = 0;
        for (size_t i = 1; i < n_experts; i++) {
            best = scores[i] > scores[best] ? i : best;
        }
        if (scores[best] == -INFINITY) {
            break;
        }
        scores[best] = -INFINITY;
        experts[n] = (int32_t)best;
    }
    return n;
}

/* Return the level whose passes took the least time on average; the least of equal ones. */
static unsigned
fastest(const struct lookahead_trial *trial)
{
    unsigned best = 0;
    for (unsigned i = 1; i < LOOKAHEAD_N_LEVELS; i++) {
        uint64_t this_ns = trial->sum_ns[i] * trial->n_passes[best];
        uint64_t best_ns = trial->sum_ns[best] * trial->n_passes[i];
        best = this_ns < best_ns ? i : best;
    }
    return best;
}

void
lookahead_next(struct lookahead_trial *trial, uint64_t pass_ns)
{
    if (trial->mode != LOOKAHEAD_MEASURED) {
        trial->level = trial->mode == LOOKAHEAD_ON ? LOOKAHEAD_N_LEVELS - 1 : 0;
        return;
    }
    if (trial->is_trying) {
        trial->sum_ns[trial->level] += pass_ns;
        trial->n_passes[trial->level]++;
    }
    if (trial->n_left > 0) {
        trial->n_left--;
    }
    if (trial->n_left == 0 && trial->is_trying) {
        *trial = (struct lookahead_trial){
            .mode = trial->mode, .n_left = REST_PASSES, .level = fastest(trial)};
    } else if (trial->n_left == 0) {
        *trial = (struct lookahead_trial){
            .mode = trial->mode, .n_left = LOOKAHEAD_N_LEVELS * TRIAL_PASSES,
            .is_trying = true};
    } else if (trial->is_trying) {
        trial->level = (unsigned)(trial->n_left / TURN_PASSES % LOOKAHEAD_N_LEVELS);
    }
}

size_t
lookahead_n_early(const struct lookahead_trial *trial, size_t n_used)
{
    return trial->level >= LOOKAHEAD_EARLY ? n_used / 2 + n_used % 2 : 0;
}

size_t
lookahead_n_late(const struct lookahead_trial *trial, size_t n_used)
{
    return trial->level >= LOOKAHEAD_LATE ? n_used - n_used / 4 : 0;
}
