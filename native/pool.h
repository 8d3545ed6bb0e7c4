/* Expert records: a cache of experts of many layers, all of one shape, in one memory.
 *
 * In: layers, each with the places of its experts in the files; then the experts that a
 * step needs. Out: the records that hold them, read in the order in which the kernels
 * use them. Knows no tensors and no llama.cpp.
 *
 * A record holds the parts (gate, up, down) of one expert. It is absent, being read, or
 * ready; those taken by the step at hand are never evicted. One thread at a time.
 * Failures are negative errno values.
 */

#ifndef HEADRACE_POOL_H
#define HEADRACE_POOL_H

#include <stdatomic.h>

#include "pages.h"
#include "policy.h"
#include "source.h"

#define POOL_MAX_PARTS 3u

/* One tensor of a layer: its experts' slices, back to back in a file. */
struct pool_part {
    unsigned file;
    uint64_t offset;     /* of expert 0 */
    size_t slice_bytes;  /* the same for all layers of a pool */
};

struct pool_layer {
    unsigned n_experts;
    struct pool_part parts[POOL_MAX_PARTS];  /* in the order of their use */
};

/* May be read from any thread while another uses the pool. */
struct pool_stats {
    atomic_uint_fast64_t n_hits;
    atomic_uint_fast64_t n_misses;
    atomic_uint_fast64_t n_evictions;
    atomic_uint_fast64_t stall_ns;  /* spent waiting for reads */
    atomic_uint_fast64_t n_guesses; /* experts read because they were likely to be chosen */
    atomic_uint_fast64_t n_useful;  /* guesses that were chosen while they were here */
    atomic_uint_fast64_t n_late;    /* useful ones that had to be waited for */
};

struct pool;

/* Return the bytes that one record takes. */
size_t pool_record_bytes(const size_t *slice_bytes, unsigned n_parts);

/* Make a pool of n_records for layers of n_parts parts each; layers are copied, source
 * must outlive it. Returns 0 or -errno. */
int pool_create(struct pool **out, struct source *source, enum policy_kind policy,
                const struct pool_layer *layers, unsigned n_layers, unsigned n_parts,
                size_t n_records);

/* Wait for what is being read and free all; NULL is none. */
void pool_destroy(struct pool *pool);

/* Have experts[0..n) of layer read, with repetitions, and put the record of each into
 * records[0..n). Does not wait. What was taken before is given back first. Returns 0,
 * -EINVAL if there is no such expert, or -ENOSPC if the pool has fewer records. */
int pool_take(struct pool *pool, unsigned layer, const int32_t *experts, size_t n,
              int32_t *records);

/* Have experts[0..n) of layer, likely to be chosen, read behind all that is taken, in
 * place of records that were not used for a whole pass. Those that were not begun when
 * the layer's experts are taken are given up again. */
void pool_guess(struct pool *pool, unsigned layer, const int32_t *experts, size_t n);

/* The same for all experts of layer, in place of any record that is not taken: for a
 * batch of so many tokens that together they choose nearly all. */
void pool_guess_all(struct pool *pool, unsigned layer);

/* Wait until a part of all records taken is there. Returns 0, or -errno and a fault;
 * then the records that failed are absent again. */
int pool_wait(struct pool *pool, unsigned part, struct fault *fault);

/* Return whether pool_wait for part would return at once. */
bool pool_is_ready(struct pool *pool, unsigned part);

/* Give back what was taken, after its last use or when the step is given up. */
void pool_release(struct pool *pool);

/* Return the experts of all layers together; they are numbered in this order below. */
size_t pool_n_experts(const struct pool *pool);

/* Put into uses[0..pool_n_experts) how many steps have used each expert. */
void pool_get_uses(const struct pool *pool, uint32_t *uses);

/* Read experts[0..n), numbers from above, into records that are absent, and wait; between
 * steps. They count as not used yet. Returns how many were read: less than n if they were
 * here already, no record is absent, or a read failed, which concerns nobody yet. */
size_t pool_fill(struct pool *pool, const uint32_t *experts, size_t n);

/* Use only the first n_records, 1 to those that the pool was made for, from now on; between
 * steps. The memory of others is given back, or taken again. Returns 0, or -errno and the
 * pool as it was. */
int pool_resize(struct pool *pool, size_t n_records);

/* Return the bytes of memory that the pool's records have now. */
size_t pool_resident_bytes(const struct pool *pool);

/* Return where the part of record 0 lies for a layer; those of the others follow at
 * multiples of pool_stride. */
void *pool_data(const struct pool *pool, unsigned layer, unsigned part);

size_t pool_stride(const struct pool *pool);

/* Return the records that the pool was made for, of which fewer may be used now. */
size_t pool_n_records(const struct pool *pool);

const struct pool_stats *pool_get_stats(const struct pool *pool);

#endif
