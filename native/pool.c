#define _POSIX_C_SOURCE 199309L  /* clock_gettime */

#include "pool_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"

size_t
pool_record_bytes(const size_t *slice_bytes, unsigned n_parts)
{
    size_t n = 0;
    for (unsigned part = 0; part < n_parts; part++) {
        n += span_room(slice_bytes[part]);
    }
    return n;
}

/* Allocate the tables of a pool whose layers are known. Returns 0 or -errno. */
static int
allocate_tables(struct pool *pool)
{
    size_t n_keys = 0;
    pool->first_key = calloc(pool->n_layers, sizeof *pool->first_key);
    if (pool->first_key == NULL) {
        return -ENOMEM;
    }
    for (unsigned i = 0; i < pool->n_layers; i++) {
        pool->first_key[i] = (uint32_t)n_keys;
        n_keys += pool->layers[i].n_experts;
    }
    if (n_keys == 0 || n_keys > INT32_MAX) {
        return -EINVAL;
    }
    pool->n_keys = n_keys;
    pool->record_of = malloc(n_keys * sizeof *pool->record_of);
    pool->uses = calloc(n_keys, sizeof *pool->uses);
    pool->records = calloc(pool->n_records, sizeof *pool->records);
    pool->absent = calloc(pool->n_records, sizeof *pool->absent);
    pool->taken = calloc(pool->n_records, sizeof *pool->taken);
    pool->guesses = calloc(pool->n_records, sizeof *pool->guesses);
    pool->late = calloc(pool->n_records, sizeof *pool->late);
    pool->issued = calloc(pool->n_records * POOL_MAX_PARTS, sizeof(struct readers_batch *));
    if (pool->record_of == NULL || pool->uses == NULL || pool->records == NULL
        || pool->absent == NULL || pool->taken == NULL || pool->guesses == NULL || pool->late == NULL || pool->issued == NULL) {
        return -ENOMEM;
    }
    for (size_t key = 0; key < n_keys; key++) {
        pool->record_of[key] = NO_RECORD;
    }
    for (size_t i = pool->n_records; i-- > 0;) {
        pool->absent[pool->n_absent++] = (int32_t)i;
    }
    return 0;
}

int
pool_create(struct pool **out, struct source *source, enum policy_kind policy,
            const struct pool_layer *layers, unsigned n_layers, unsigned n_parts,
            size_t n_records)
{
    *out = NULL;
    if (n_layers == 0 || n_parts == 0 || n_parts > POOL_MAX_PARTS || n_records == 0) {
        return -EINVAL;
    }
    struct pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL) {
        return -ENOMEM;
    }
    pool->source = source;
    pool->n_layers = n_layers;
    pool->n_parts = n_parts;
    pool->n_records = pool->n_usable = n_records;
    for (unsigned part = 0; part < n_parts; part++) {
        pool->part_offset[part] = pool->stride;
        pool->stride += span_room(layers[0].parts[part].slice_bytes);
    }
    pool->layers = calloc(n_layers, sizeof *layers);
    int error = -ENOMEM;
    if (pool->layers != NULL) {
        memcpy(pool->layers, layers, n_layers * sizeof *layers);
        error = allocate_tables(pool);
    }
    if (error == 0) {
        error = policy_create(&pool->policy, policy, n_records);
    }
    if (error == 0 && n_records > SIZE_MAX / pool->stride) {
        error = -ENOMEM;
    }
    if (error == 0) {
        error = pages_map(&pool->pages, n_records * pool->stride);
    }
    if (error != 0) {
        pool_destroy(pool);
        return error;
    }
    *out = pool;
    return 0;
}

void
pool_drop(struct pool *pool, int32_t i)
{
    struct record *record = &pool->records[i];
    pool->record_of[record->key] = NO_RECORD;
    record->state = ABSENT;
    record->is_guess = false;
    pool->absent[pool->n_absent++] = i;
    policy_forget(pool->policy, i);
}

int
pool_settle(struct pool *pool, int32_t i, struct fault *fault)
{
    struct record *record = &pool->records[i];
    int error = 0;
    if (record->state != READING) {
        return 0;
    }
    for (unsigned part = 0; part < pool->n_parts; part++) {
        readers_wait(pool->source->readers, &record->batches[part]);
        int part_error = span_check(&record->spans[part], pool->source, fault);
        error = error == 0 ? part_error : error;
    }
    record->state = READY;
    if (error != 0) {
        pool_drop(pool, i);
    }
    return error;
}

void
pool_destroy(struct pool *pool)
{
    if (pool == NULL) {
        return;
    }
    struct fault ignored = {0};
    for (size_t i = 0; pool->records != NULL && i < pool->n_records; i++) {
        (void)pool_settle(pool, (int32_t)i, &ignored);
    }
    pages_unmap(&pool->pages);
    policy_destroy(pool->policy);
    free(pool->issued);
    free(pool->late);
    free(pool->guesses);
    free(pool->taken);
    free(pool->absent);
    free(pool->records);
    free(pool->uses);
    free(pool->record_of);
    free(pool->first_key);
    free(pool->layers);
    free(pool);
}

void
pool_release(struct pool *pool)
{
    /* A fault that nobody waited for concerns nobody: whoever needs it reads it again. */
    struct fault ignored = {0};
    for (size_t i = 0; i < pool->n_taken; i++) {
        (void)pool_settle(pool, pool->taken[i], &ignored);
        pool->records[pool->taken[i]].is_taken = false;
    }
    pool->n_taken = 0;
}

bool
pool_may_go(void *owner, int32_t i)
{
    const struct pool *pool = owner;
    return !pool->records[i].is_taken && pool->records[i].state == READY;
}

static void
take(struct pool *pool, int32_t i)
{
    pool->records[i].is_taken = true;
    pool->records[i].used_at = pool->n_takes;
    pool->uses[pool->records[i].key]++;
    pool->taken[pool->n_taken++] = i;
    policy_use(pool->policy, i);
}

int32_t
pool_admit(struct pool *pool, unsigned layer, uint32_t expert, policy_filter filter)
{
    if (pool->n_absent == 0) {
        int32_t victim = policy_victim(pool->policy, filter, pool);
        if (victim < 0) {
            return -1;
        }
        pool_drop(pool, victim);
        atomic_fetch_add(&pool->stats.n_evictions, 1);
    }
    int32_t i = pool->absent[--pool->n_absent];
    struct record *record = &pool->records[i];
    record->state = READING;
    record->key = pool->first_key[layer] + expert;
    pool->record_of[record->key] = i;
    for (unsigned part = 0; part < pool->n_parts; part++) {
        const struct pool_part *p = &pool->layers[layer].parts[part];
        unsigned char *data = pool_data(pool, layer, part);
        span_set(&record->spans[part], pool->source, p->file,
                 p->offset + (uint64_t)expert * p->slice_bytes, p->slice_bytes,
                 data + (size_t)i * pool->stride);
        record->batches[part] = (struct readers_batch){0};
        readers_batch_add(&record->batches[part], &record->spans[part].request);
    }
    return i;
}

void
pool_issue(struct pool *pool, const int32_t *records, size_t n_records, bool is_urgent)
{
    size_t n = 0;
    for (unsigned part = 0; part < pool->n_parts; part++) {
        for (size_t i = 0; i < n_records; i++) {
            pool->issued[n++] = &pool->records[records[i]].batches[part];
        }
    }
    readers_submit_all(pool->source->readers, pool->issued, n, is_urgent);
}

/* Return whether reads of a record are still to be waited for. */
static bool
is_reading(struct pool *pool, int32_t i)
{
    bool is_finished = true;
    for (unsigned part = 0; part < pool->n_parts; part++) {
        is_finished = is_finished
                      && readers_is_finished(pool->source->readers,
                                             &pool->records[i].batches[part]);
    }
    return !is_finished;
}

/* Take those of the experts that are here, or are being read. Returns 0 or -EINVAL. */
static int
take_present(struct pool *pool, unsigned layer, const int32_t *experts, size_t n)
{
    const int32_t *record_of = pool->record_of + pool->first_key[layer];
    size_t n_late = 0;
    for (size_t i = 0; i < n; i++) {
        if (experts[i] < 0 || (unsigned)experts[i] >= pool->layers[layer].n_experts) {
            return -EINVAL;
        }
        int32_t record = record_of[experts[i]];
        if (record < 0 || pool->records[record].is_taken) {
            continue;
        }
        if (pool->records[record].is_guess) {
            pool->records[record].is_guess = false;
            atomic_fetch_add(&pool->stats.n_useful, 1);
            if (pool->records[record].state == READING && is_reading(pool, record)) {
                pool->late[n_late++] = record;
            }
        }
        take(pool, record);
    }
    pool_promote(pool, pool->late, n_late);
    atomic_fetch_add(&pool->stats.n_late, n_late);
    return 0;
}

int
pool_take(struct pool *pool, unsigned layer, const int32_t *experts, size_t n,
          int32_t *records)
{
    if (layer >= pool->n_layers) {
        return -EINVAL;
    }
    pool_release(pool);
    pool->n_takes++;
    /* First all that is here: to make room for one must not evict another. */
    int error = take_present(pool, layer, experts, n);
    pool_sort_out_guesses(pool);
    size_t n_hits = pool->n_taken;
    const int32_t *record_of = pool->record_of + pool->first_key[layer];
    for (size_t i = 0; i < n && error == 0; i++) {
        int32_t record = record_of[experts[i]];
        if (record < 0) {
            record = pool_admit(pool, layer, (uint32_t)experts[i], pool_may_go);
            if (record < 0 && pool->n_guesses > 0) {
                pool_settle_guesses(pool);
                record = pool_admit(pool, layer, (uint32_t)experts[i], pool_may_go);
            }
            if (record < 0) {
                error = -ENOSPC;
                break;
            }
            take(pool, record);
        }
        records[i] = record;
    }
    pool_issue(pool, pool->taken + n_hits, pool->n_taken - n_hits, true);
    atomic_fetch_add(&pool->stats.n_hits, n_hits);
    atomic_fetch_add(&pool->stats.n_misses, pool->n_taken - n_hits);
    if (error != 0) {
        pool_release(pool);
    }
    return error;
}

int
pool_wait(struct pool *pool, unsigned part, struct fault *fault)
{
    uint64_t started_ns = 0;
    int error = 0;
    for (size_t i = 0; i < pool->n_taken; i++) {
        struct record *record = &pool->records[pool->taken[i]];
        if (record->state == READY) {
            continue;
        }
        started_ns = started_ns == 0 ? clock_ns() : started_ns;
        int record_error;
        if (part + 1 == pool->n_parts) {
            record_error = pool_settle(pool, pool->taken[i], fault);
        } else {
            readers_wait(pool->source->readers, &record->batches[part]);
            record_error = span_check(&record->spans[part], pool->source, fault);
        }
        error = error == 0 ? record_error : error;
    }
    if (started_ns != 0) {
        atomic_fetch_add(&pool->stats.stall_ns, clock_ns() - started_ns);
    }
    if (error != 0) {
        pool_release(pool);
    }
    return error;
}

bool
pool_is_ready(struct pool *pool, unsigned part)
{
    for (size_t i = 0; i < pool->n_taken; i++) {
        struct record *record = &pool->records[pool->taken[i]];
        if (record->state == READING
            && !readers_is_finished(pool->source->readers, &record->batches[part])) {
            return false;
        }
    }
    return true;
}

void *
pool_data(const struct pool *pool, unsigned layer, unsigned part)
{
    return span_place((unsigned char *)pool->pages.data + pool->part_offset[part],
                      pool->layers[layer].parts[part].offset);
}

size_t
pool_stride(const struct pool *pool)
{
    return pool->stride;
}

size_t
pool_n_records(const struct pool *pool)
{
    return pool->n_records;
}

const struct pool_stats *
pool_get_stats(const struct pool *pool)
{
    return &pool->stats;
}
