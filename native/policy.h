/* Which record to give up when one is needed: the replaceable part of a pool.
 *
 * In: which records are used, in order. Out: the record to evict. Knows neither what a
 * record holds nor whether it may go: it is asked for candidates until one may.
 */

#ifndef HEADRACE_POLICY_H
#define HEADRACE_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum policy_kind {
    POLICY_LRU,  /* the record whose last use is longest ago */
    POLICY_LFU,  /* the least often used one; counts are halved as time goes by */
    POLICY_MRU,  /* the record used last: the worst order, for tests */
    POLICY_LRFU, /* as LRU, but each former use counts as if the last were more recent */
};

struct policy;

typedef bool (*policy_filter)(void *owner, int32_t record);

/* Make a policy for n_records, 1 to INT32_MAX - 1, none of them used. Returns 0 or
 * -errno. */
int policy_create(struct policy **out, enum policy_kind kind, size_t n_records);

/* Note a use of record. */
void policy_use(struct policy *policy, int32_t record);

/* Forget the uses of record: it is the first to go. */
void policy_forget(struct policy *policy, int32_t record);

/* Return the record to evict among those that may_go lets go, or -1. */
int32_t policy_victim(const struct policy *policy, policy_filter may_go, void *owner);

/* Free policy; NULL is none. */
void policy_destroy(struct policy *policy);

#endif
