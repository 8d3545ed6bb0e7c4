#include "pool_private.h"

/* May go for a guess: not what this pass used, it was read for good reason. */
static bool
may_go_for_guess(void *owner, int32_t i)
{
    const struct pool *pool = owner;
    return pool_may_go(owner, i)
           && pool->records[i].used_at + pool->n_layers < pool->n_takes;
}

void
pool_promote(struct pool *pool, const int32_t *records, size_t n_records)
{
    size_t n = 0;
    for (unsigned part = 0; part < pool->n_parts; part++) {
        for (size_t i = 0; i < n_records; i++) {
            struct readers_batch *batch = &pool->records[records[i]].batches[part];
            if (readers_cancel(pool->source->readers, batch)) {
                pool->issued[n++] = batch;
            }
        }
    }
    readers_submit_all(pool->source->readers, pool->issued, n, true);
}

/* Give up the read of a record of which nothing is begun. Returns whether it was so. */
static bool
cancel(struct pool *pool, int32_t i)
{
    struct record *record = &pool->records[i];
    unsigned part = 0;
    while (part < pool->n_parts
           && readers_cancel(pool->source->readers, &record->batches[part])) {
        pool->issued[part] = &record->batches[part];
        part++;
    }
    if (part == pool->n_parts) {
        pool_drop(pool, i);
        return true;
    }
    readers_submit_all(pool->source->readers, pool->issued, part, false);
    return false;
}

void
pool_sort_out_guesses(struct pool *pool)
{
    struct fault ignored = {0};
    size_t n_kept = 0;
    for (size_t i = 0; i < pool->n_guesses; i++) {
        int32_t guess = pool->guesses[i];
        if (pool->records[guess].is_taken) {
            continue;
        }
        bool is_finished = true;
        for (unsigned part = 0; part < pool->n_parts; part++) {
            is_finished = is_finished
                          && readers_is_finished(pool->source->readers,
                                                 &pool->records[guess].batches[part]);
        }
        if (is_finished) {
            (void)pool_settle(pool, guess, &ignored);
        } else if (cancel(pool, guess)) {
            atomic_fetch_sub(&pool->stats.n_guesses, 1);
        } else {
            pool->guesses[n_kept++] = guess;
        }
    }
    pool->n_guesses = n_kept;
}

void
pool_settle_guesses(struct pool *pool)
{
    struct fault ignored = {0};
    while (pool->n_guesses > 0) {
        (void)pool_settle(pool, pool->guesses[--pool->n_guesses], &ignored);
    }
}

/* Set up the read of an expert that may be chosen. False: there is no record for it. */
static bool
guess_one(struct pool *pool, unsigned layer, uint32_t expert, policy_filter filter)
{
    if (pool->record_of[pool->first_key[layer] + expert] >= 0) {
        return true;
    }
    int32_t record =
        pool->n_guesses < pool->n_records ? pool_admit(pool, layer, expert, filter) : -1;
    if (record < 0) {
        return false;
    }
    /* Not a use: a guess that turns out wrong is the first to go. */
    pool->records[record].is_guess = true;
    pool->guesses[pool->n_guesses++] = record;
    return true;
}

static void
issue_guesses(struct pool *pool, size_t first)
{
    size_t n_new = pool->n_guesses - first;
    pool_issue(pool, pool->guesses + first, n_new, false);
    atomic_fetch_add(&pool->stats.n_guesses, n_new);
}

void
pool_guess(struct pool *pool, unsigned layer, const int32_t *experts, size_t n)
{
    size_t first = pool->n_guesses;
    for (size_t i = 0; i < n; i++) {
        if (!guess_one(pool, layer, (uint32_t)experts[i], may_go_for_guess)) {
            break;
        }
    }
    issue_guesses(pool, first);
}

void
pool_guess_all(struct pool *pool, unsigned layer)
{
    size_t first = pool->n_guesses;
    for (uint32_t i = 0; i < pool->layers[layer].n_experts; i++) {
        if (!guess_one(pool, layer, i, pool_may_go)) {
            break;
        }
    }
    issue_guesses(pool, first);
}

