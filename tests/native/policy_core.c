/* Policies: who goes first, and that nobody goes who may not. */

#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "policy.h"

enum { N_RECORDS = 32 };

/* Records below the number that owner points to may not go. */
static bool
may_go(void *owner, int32_t record)
{
    return record >= *(const int32_t *)owner;
}

/* Return the victim after each record was used once, and those of uses once more. */
static int32_t
victim(enum policy_kind kind, const int32_t *uses, size_t n_uses, int32_t first)
{
    struct policy *policy;
    CHECK(policy_create(&policy, kind, N_RECORDS) == 0);
    for (int32_t i = 0; i < N_RECORDS; i++) {
        policy_use(policy, i);
    }
    for (size_t i = 0; i < n_uses; i++) {
        policy_use(policy, uses[i]);
    }
    int32_t found = policy_victim(policy, may_go, &first);
    policy_destroy(policy);
    return found;
}

int
main(void)
{
    const int32_t uses[] = {0, 0, 1};
    CHECK(victim(POLICY_LRU, uses, 3, 0) == 2);
    CHECK(victim(POLICY_LFU, uses, 3, 0) == 2);
    CHECK(victim(POLICY_LRFU, uses, 3, 0) == 2);
    CHECK(victim(POLICY_MRU, uses, 3, 0) == 1);
    for (int kind = POLICY_LRU; kind <= POLICY_LRFU; kind++) {
        CHECK(victim((enum policy_kind)kind, uses, 3, 9) >= 9);
        CHECK(victim((enum policy_kind)kind, uses, 3, N_RECORDS) == -1);
    }
    /* Record 0 was used often and long ago, all others twice since: LRU gives it up, LFU
     * never does, LRFU does once its credit is used up. */
    int32_t often[15 + 4 * (N_RECORDS - 1)] = {0};
    for (size_t i = 15; i < sizeof often / sizeof *often; i++) {
        often[i] = 1 + (int32_t)(i - 15) % (N_RECORDS - 1);
    }
    size_t once = 15 + N_RECORDS - 1;
    CHECK(victim(POLICY_LRU, often, once, 0) == 0);
    CHECK(victim(POLICY_LFU, often, once, 0) != 0);
    CHECK(victim(POLICY_LRFU, often, once, 0) != 0);
    CHECK(victim(POLICY_LRFU, often, sizeof often / sizeof *often, 0) == 0);
    return 0;
}
