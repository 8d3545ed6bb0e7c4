/* Lookahead: the experts that a router likes best, and the level that is measured to pay. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "lookahead.h"

enum { N_INPUTS = 19, N_EXPERTS = 6 };

static void
test_the_likeliest_experts_come_first(void)
{
    static float router[N_EXPERTS * N_INPUTS], state[N_INPUTS];
    const float scores[N_EXPERTS] = {2, -1, 5, NAN, 5.5f, 0};
    for (int i = 0; i < N_EXPERTS; i++) {
        router[i * N_INPUTS + N_INPUTS - 1] = scores[i];
    }
    state[N_INPUTS - 1] = 1;
    int32_t experts[N_EXPERTS];
    CHECK(lookahead(router, N_INPUTS, N_EXPERTS, state, 3, experts) == 3);
    CHECK(experts[0] == 4 && experts[1] == 2 && experts[2] == 0);
    CHECK(lookahead(router, N_INPUTS, N_EXPERTS, state, N_EXPERTS, experts)
          == N_EXPERTS - 1);
}

/* Return the level that a trial settles on if passes at the levels take so long. */
static unsigned
settled(const uint64_t pass_ns[LOOKAHEAD_N_LEVELS])
{
    struct lookahead_trial trial = {.mode = LOOKAHEAD_MEASURED};
    lookahead_next(&trial, 1);
    unsigned n_tried[LOOKAHEAD_N_LEVELS] = {0};
    while (trial.is_trying) {
        n_tried[trial.level]++;
        lookahead_next(&trial, pass_ns[trial.level]);
    }
    for (unsigned i = 0; i < LOOKAHEAD_N_LEVELS; i++) {
        CHECK(n_tried[i] >= 8);
    }
    unsigned level = trial.level;
    for (int i = 0; i < 100; i++) {
        lookahead_next(&trial, 1000);
        CHECK(trial.level == level);
    }
    return level;
}

static void
test_the_fastest_level_is_kept(void)
{
    for (unsigned best = 0; best < LOOKAHEAD_N_LEVELS; best++) {
        uint64_t pass_ns[LOOKAHEAD_N_LEVELS];
        for (unsigned i = 0; i < LOOKAHEAD_N_LEVELS; i++) {
            pass_ns[i] = i == best ? 90 : 100 + i;
        }
        CHECK(settled(pass_ns) == best);
    }
    /* Where guesses change nothing they are not made. */
    CHECK(settled((uint64_t[LOOKAHEAD_N_LEVELS]){100, 100, 100}) == 0);
}

static void
test_levels_are_never_late_and_also_early(void)
{
    struct lookahead_trial trial = {.mode = LOOKAHEAD_OFF};
    lookahead_next(&trial, 1);
    CHECK(lookahead_n_early(&trial, 8) == 0 && lookahead_n_late(&trial, 8) == 0);
    trial.level = LOOKAHEAD_LATE;
    CHECK(lookahead_n_early(&trial, 8) == 0 && lookahead_n_late(&trial, 8) == 6);
    trial.mode = LOOKAHEAD_ON;
    lookahead_next(&trial, 1);
    CHECK(lookahead_n_early(&trial, 8) == 4 && lookahead_n_late(&trial, 8) == 6);
    CHECK(lookahead_n_early(&trial, 1) == 1 && lookahead_n_late(&trial, 1) == 1);
}

int
main(void)
{
    test_the_likeliest_experts_come_first();
    test_the_fastest_level_is_kept();
    test_levels_are_never_late_and_also_early();
    return 0;
}
