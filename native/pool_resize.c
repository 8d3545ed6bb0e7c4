#include <errno.h>

#include "pool_private.h"

/* Forget what the records from n_records on hold; none of them is free any more. */
static void
drop_from(struct pool *pool, size_t n_records)
{
    for (size_t i = n_records; i < pool->n_usable; i++) {
        if (pool->records[i].state != ABSENT) {
            pool_drop(pool, (int32_t)i);
        }
    }
    size_t n_kept = 0;
    for (size_t i = 0; i < pool->n_absent; i++) {
        if ((size_t)pool->absent[i] < n_records) {
            pool->absent[n_kept++] = pool->absent[i];
        }
    }
    pool->n_absent = n_kept;
}

int
pool_resize(struct pool *pool, size_t n_records)
{
    if (n_records == 0 || n_records > pool->n_records) {
        return -EINVAL;
    }
    pool_release(pool);
    pool_settle_guesses(pool);
    if (n_records < pool->n_usable) {
        drop_from(pool, n_records);
        pool->n_usable = n_records;
        return pages_give_back(&pool->pages, n_records * pool->stride);
    }
    int error = pages_take_back(&pool->pages, pool->n_usable * pool->stride,
                                n_records * pool->stride);
    for (; error == 0 && pool->n_usable < n_records; pool->n_usable++) {
        pool->absent[pool->n_absent++] = (int32_t)pool->n_usable;
    }
    return error;
}

size_t
pool_resident_bytes(const struct pool *pool)
{
    return pool->n_usable * pool->stride;
}
