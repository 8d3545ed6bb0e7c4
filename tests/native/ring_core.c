/* ring.h against plain memory: sweeps in order, jumps, steps given up, reads that fail.
 *
 * Exit status: 0 passed, 1 failed. Runs under ASan and UBSan, and under TSan.
 */

#define _GNU_SOURCE  /* RTLD_NEXT */

#include "ring.h"
#include "core_test.h"

#include <string.h>

#define N_TENSORS 9u
#define SIZE ((size_t)6 * 1024 * 1024)

static struct source *source;

static struct ring *
create(struct ring_tensor *tensors, unsigned n_slots)
{
    uint64_t offset = 1312;
    for (unsigned i = 0; i < N_TENSORS; i++) {
        tensors[i] = (struct ring_tensor){0, offset, 4096 * (i % 4) + 150000 + 32 * i};
        offset += tensors[i].len + 32;
    }
    CHECK(offset <= SIZE);
    struct ring *ring;
    CHECK(ring_create(&ring, source, tensors, N_TENSORS, n_slots) == 0);
    return ring;
}

static void
check_tensor(struct ring *ring, const struct ring_tensor *tensors, unsigned i)
{
    void *data;
    struct fault fault = {0};
    CHECK(ring_get(ring, i, &data, &fault) == 0);
    CHECK(memcmp(data, files[0].content + tensors[i].offset, tensors[i].len) == 0);
}

static void
test_sweeps_are_read_ahead_over_their_end(unsigned n_slots)
{
    struct ring_tensor tensors[N_TENSORS];
    struct ring *ring = create(tensors, n_slots);
    for (unsigned i = 0; i < 5 * N_TENSORS; i++) {
        check_tensor(ring, tensors, i % N_TENSORS);
        if (i % 2 == 0) {
            ring_release(ring);
        }
    }
    const struct ring_stats *stats = ring_get_stats(ring);
    CHECK(atomic_load(&stats->n_demand) == 1);
    CHECK(atomic_load(&stats->n_ahead) == 5 * N_TENSORS - 1);
    ring_destroy(ring);
}

static void
test_another_order_is_learnt(void)
{
    struct ring_tensor tensors[N_TENSORS];
    struct ring *ring = create(tensors, 3);
    for (unsigned i = 0; i < 6 * N_TENSORS; i++) {
        check_tensor(ring, tensors, i * 4 % N_TENSORS);
    }
    const struct ring_stats *stats = ring_get_stats(ring);
    CHECK(atomic_load(&stats->n_demand) <= N_TENSORS + 1);
    ring_destroy(ring);
}

static void
test_jumps_give_the_right_bytes(unsigned n_slots)
{
    struct ring_tensor tensors[N_TENSORS];
    struct ring *ring = create(tensors, n_slots);
    for (unsigned i = 0; i < 80; i++) {
        check_tensor(ring, tensors, next_random(N_TENSORS));
    }
    ring_destroy(ring);
}

static void
test_a_failed_read_is_a_fault_and_is_read_again(void)
{
    struct ring_tensor tensors[N_TENSORS];
    struct ring *ring = create(tensors, 3);
    bad = (off_t)tensors[4].offset + 5000;  /* not in a block of the one before */
    for (unsigned i = 0; i < 4; i++) {
        check_tensor(ring, tensors, i);
    }
    void *data;
    struct fault fault = {0};
    CHECK(ring_get(ring, 4, &data, &fault) == -EIO && data == NULL);
    CHECK(fault.error == -EIO && fault.offset == tensors[4].offset);
    CHECK(fault.len == tensors[4].len);
    bad = 0;
    for (unsigned i = 0; i < 2 * N_TENSORS; i++) {
        check_tensor(ring, tensors, i % N_TENSORS);
    }
    ring_destroy(ring);
}

static void
test_a_file_that_ends_is_a_fault(void)
{
    struct ring_tensor tensors[N_TENSORS];
    struct ring *ring = create(tensors, 2);
    check_tensor(ring, tensors, 6);
    CHECK(truncate(files[0].path, (off_t)(tensors[8].offset + 5000)) == 0);
    void *data;
    struct fault fault = {0};
    CHECK(ring_get(ring, 8, &data, &fault) == -ENODATA && fault.error == -ENODATA);
    ring_destroy(ring);
}

int
main(void)
{
    make_file(0, SIZE);
    const char *paths[] = {files[0].path};
    unsigned failed;
    CHECK(source_open(&source, paths, 1, 3, false, &failed) == 0);
    for (unsigned n_slots = RING_MIN_SLOTS; n_slots < 6; n_slots++) {
        test_sweeps_are_read_ahead_over_their_end(n_slots);
        test_jumps_give_the_right_bytes(n_slots);
    }
    test_another_order_is_learnt();
    test_a_failed_read_is_a_fault_and_is_read_again();
    test_a_file_that_ends_is_a_fault();
    source_close(source);
    return 0;
}
