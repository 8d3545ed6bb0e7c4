#include <string.h>

#include "pool_private.h"

size_t
pool_n_experts(const struct pool *pool)
{
    return pool->n_keys;
}

void
pool_get_uses(const struct pool *pool, uint32_t *uses)
{
    memcpy(uses, pool->uses, pool->n_keys * sizeof *uses);
}

/* Nothing may go for what is only likely to be used some day. */
static bool
may_not_go(void *owner, int32_t i)
{
    (void)owner;
    (void)i;
    return false;
}

static unsigned
layer_of(const struct pool *pool, uint32_t key)
{
    unsigned layer = pool->n_layers - 1;
    while (pool->first_key[layer] > key) {
        layer--;
    }
    return layer;
}

size_t
pool_fill(struct pool *pool, const uint32_t *experts, size_t n)
{
    pool_release(pool);
    size_t first = pool->n_guesses;
    for (size_t i = 0; i < n && pool->n_absent > 0 && pool->n_guesses < pool->n_records;
         i++) {
        if (experts[i] < pool->n_keys && pool->record_of[experts[i]] < 0) {
            unsigned layer = layer_of(pool, experts[i]);
            uint32_t expert = experts[i] - pool->first_key[layer];
            pool->guesses[pool->n_guesses++] = pool_admit(pool, layer, expert, may_not_go);
        }
    }
    pool_issue(pool, pool->guesses + first, pool->n_guesses - first, false);
    size_t n_read = 0;
    while (pool->n_guesses > first) {
        struct fault ignored = {0};
        n_read += pool_settle(pool, pool->guesses[--pool->n_guesses], &ignored) == 0;
    }
    return n_read;
}
