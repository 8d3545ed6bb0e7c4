/* Dense weights on their way through memory: slots filled in the order of use.
 *
 * In: the tensors that are streamed, in the order in which a pass uses them; then which
 * one is needed next. Out: its bytes, read ahead while those before it were used, also
 * over the end of a pass into the next. Nothing is kept for a second use: a cyclic sweep
 * would have evicted it. Knows no llama.cpp.
 *
 * One thread at a time. Failures are negative errno values.
 */

#ifndef HEADRACE_RING_H
#define HEADRACE_RING_H

#include <stdatomic.h>

#include "pages.h"
#include "source.h"

#define RING_MIN_SLOTS 2u

struct ring_tensor {
    unsigned file;
    uint64_t offset;
    size_t len;
};

/* May be read from any thread while another uses the ring. */
struct ring_stats {
    atomic_uint_fast64_t n_ahead;    /* tensors that were asked for in the order expected */
    atomic_uint_fast64_t n_demand;   /* tensors that were not: read when they were needed */
    atomic_uint_fast64_t stall_ns;   /* spent waiting for reads */
};

struct ring;

/* Return the bytes of a slot for tensors of at most max_bytes. */
size_t ring_slot_bytes(size_t max_bytes);

/* Make a ring of n_slots (RING_MIN_SLOTS or more) for tensors, which are copied; source
 * must outlive it. Returns 0 or -errno. */
int ring_create(struct ring **out, struct source *source,
                const struct ring_tensor *tensors, unsigned n_tensors, unsigned n_slots);

/* Wait for what is being read and free all; NULL is none. */
void ring_destroy(struct ring *ring);

/* Wait for tensor and return its bytes, valid until ring_release, in *data. What was got
 * before is released. Returns 0, or -errno and a fault; then *data is NULL. */
int ring_get(struct ring *ring, unsigned tensor, void **data, struct fault *fault);

/* Give the slot of the tensor at hand to the next to be read. */
void ring_release(struct ring *ring);

/* Return whether ring_get for tensor would return at once. */
bool ring_is_ready(struct ring *ring, unsigned tensor);

const struct ring_stats *ring_get_stats(const struct ring *ring);

#endif
