#define _POSIX_C_SOURCE 199309L  /* clock_gettime */

#include "ring.h"

#include <errno.h>
#include <stdlib.h>

#include "clock.h"

struct slot {
    unsigned tensor;
    struct span span;
    struct readers_batch batch;
    void *data;
};

/* Slots head, head + 1, ... of n_filled hold tensors in the order expected; the first is
 * at hand if is_held. */
struct ring {
    struct source *source;
    struct pages pages;
    size_t slot_bytes;
    unsigned n_tensors;
    struct ring_tensor *tensors;
    unsigned *next;  /* tensor that followed, the last time */
    unsigned n_slots;
    unsigned head;
    unsigned n_filled;
    bool is_held;
    bool has_last;
    unsigned last;  /* tensor got before, if has_last */
    struct slot *slots;
    struct ring_stats stats;
};

size_t
ring_slot_bytes(size_t max_bytes)
{
    return span_room(max_bytes);
}

static struct slot *
slot_at(struct ring *ring, unsigned i)
{
    return &ring->slots[(ring->head + i) % ring->n_slots];
}

/* Start to read tensor into the first slot that is free; there is one. */
static void
start(struct ring *ring, unsigned tensor)
{
    const struct ring_tensor *t = &ring->tensors[tensor];
    unsigned i = (ring->head + ring->n_filled) % ring->n_slots;
    struct slot *slot = &ring->slots[i];
    unsigned char *room = (unsigned char *)ring->pages.data + i * ring->slot_bytes;
    slot->tensor = tensor;
    slot->data = span_place(room, t->offset);
    span_set(&slot->span, ring->source, t->file, t->offset, t->len, slot->data);
    slot->batch = (struct readers_batch){0};
    readers_batch_add(&slot->batch, &slot->span.request);
    readers_submit(ring->source->readers, &slot->batch);
    ring->n_filled++;
}

/* Fill the free slots with what is likely to follow. */
static void
run_ahead(struct ring *ring)
{
    while (ring->n_filled > 0 && ring->n_filled < ring->n_slots) {
        start(ring, ring->next[slot_at(ring, ring->n_filled - 1)->tensor]);
    }
}

/* Free the first slot, whose read may be under way. */
static void
drop_first(struct ring *ring)
{
    readers_wait(ring->source->readers, &slot_at(ring, 0)->batch);
    ring->head = (ring->head + 1) % ring->n_slots;
    ring->n_filled--;
}

int
ring_create(struct ring **out, struct source *source, const struct ring_tensor *tensors,
            unsigned n_tensors, unsigned n_slots)
{
    *out = NULL;
    if (n_tensors == 0 || n_slots < RING_MIN_SLOTS) {
        return -EINVAL;
    }
    struct ring *ring = calloc(1, sizeof *ring);
    if (ring == NULL) {
        return -ENOMEM;
    }
    ring->source = source;
    ring->n_tensors = n_tensors;
    ring->n_slots = n_slots;
    ring->tensors = calloc(n_tensors, sizeof *tensors);
    ring->next = calloc(n_tensors, sizeof *ring->next);
    ring->slots = calloc(n_slots, sizeof *ring->slots);
    int error = -ENOMEM;
    if (ring->tensors != NULL && ring->next != NULL && ring->slots != NULL) {
        size_t max_bytes = 0;
        for (unsigned i = 0; i < n_tensors; i++) {
            ring->tensors[i] = tensors[i];
            ring->next[i] = (i + 1) % n_tensors;
            max_bytes = tensors[i].len > max_bytes ? tensors[i].len : max_bytes;
        }
        ring->slot_bytes = ring_slot_bytes(max_bytes);
        error = pages_map(&ring->pages, n_slots * ring->slot_bytes);
    }
    if (error != 0) {
        ring_destroy(ring);
        return error;
    }
    *out = ring;
    return 0;
}

void
ring_destroy(struct ring *ring)
{
    if (ring == NULL) {
        return;
    }
    while (ring->n_filled > 0) {
        drop_first(ring);
    }
    pages_unmap(&ring->pages);
    free(ring->slots);
    free(ring->next);
    free(ring->tensors);
    free(ring);
}

/* Have tensor in the first slot: drop what was expected before it and did not come. */
static void
seek(struct ring *ring, unsigned tensor)
{
    unsigned i = 0;
    while (i < ring->n_filled && slot_at(ring, i)->tensor != tensor) {
        i++;
    }
    bool is_expected = i < ring->n_filled;
    while (i > 0) {
        drop_first(ring);
        i--;
    }
    if (!is_expected) {
        start(ring, tensor);
        atomic_fetch_add(&ring->stats.n_demand, 1);
    } else {
        atomic_fetch_add(&ring->stats.n_ahead, 1);
    }
    if (ring->has_last) {
        ring->next[ring->last] = tensor;
    }
    ring->last = tensor;
    ring->has_last = true;
}

int
ring_get(struct ring *ring, unsigned tensor, void **data, struct fault *fault)
{
    *data = NULL;
    ring_release(ring);
    seek(ring, tensor);
    run_ahead(ring);
    struct slot *slot = slot_at(ring, 0);
    if (!readers_is_finished(ring->source->readers, &slot->batch)) {
        uint64_t started_ns = clock_ns();
        readers_wait(ring->source->readers, &slot->batch);
        atomic_fetch_add(&ring->stats.stall_ns, clock_ns() - started_ns);
    }
    int error = span_check(&slot->span, ring->source, fault);
    if (error != 0) {
        /* What is read ahead may have failed too, or not: start afresh. */
        while (ring->n_filled > 0) {
            drop_first(ring);
        }
        return error;
    }
    ring->is_held = true;
    *data = slot->data;
    return 0;
}

void
ring_release(struct ring *ring)
{
    if (ring->is_held) {
        ring->is_held = false;
        drop_first(ring);
        if (ring->n_filled == 0) {
            start(ring, ring->next[ring->last]);
        }
        run_ahead(ring);
    }
}

bool
ring_is_ready(struct ring *ring, unsigned tensor)
{
    struct slot *slot = slot_at(ring, 0);
    return ring->n_filled > 0 && !ring->is_held && slot->tensor == tensor
           && readers_is_finished(ring->source->readers, &slot->batch);
}

const struct ring_stats *
ring_get_stats(const struct ring *ring)
{
    return &ring->stats;
}
