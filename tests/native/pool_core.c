/* pool.h and policy.h against plain memory: every expert's bytes, under every policy, with
 * pools from the smallest; unions that do not fit; reads that fail; files that change.
 *
 * Exit status: 0 passed, 1 failed. Runs under ASan and UBSan, and under TSan.
 */

#define _GNU_SOURCE  /* RTLD_NEXT */

#include "pool.h"
#include "core_test.h"

#include <string.h>

#define N_LAYERS 3u
#define N_EXPERTS 12u
#define N_PARTS 3u
#define N_USED 4u
#define SIZE ((size_t)6 * 1024 * 1024)

static struct source *source;

/* Describe layers whose slices are, or are not, whole blocks. */
static void
describe(struct pool_layer *layers, size_t slice_bytes)
{
    uint64_t offset = 1312;
    for (unsigned i = 0; i < N_LAYERS; i++) {
        layers[i] = (struct pool_layer){.n_experts = N_EXPERTS};
        for (unsigned part = 0; part < N_PARTS; part++) {
            layers[i].parts[part] = (struct pool_part){0, offset, slice_bytes};
            offset += N_EXPERTS * slice_bytes + 32 * (i + 1);
        }
    }
    CHECK(offset <= SIZE);
}

static struct pool *
create(const struct pool_layer *layers, enum policy_kind policy, size_t n_records)
{
    struct pool *pool;
    CHECK(pool_create(&pool, source, policy, layers, N_LAYERS, N_PARTS, n_records) == 0);
    return pool;
}

static void
choose(int32_t *experts, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        experts[i] = (int32_t)next_random(N_EXPERTS);
    }
}

static void
check_bytes(struct pool *pool, const struct pool_layer *layers, unsigned layer,
            const int32_t *experts, const int32_t *records, size_t n)
{
    for (unsigned part = 0; part < N_PARTS; part++) {
        const struct pool_part *p = &layers[layer].parts[part];
        struct fault fault = {0};
        CHECK(pool_wait(pool, part, &fault) == 0);
        CHECK(pool_is_ready(pool, part));
        for (size_t i = 0; i < n; i++) {
            const unsigned char *data = pool_data(pool, layer, part);
            data += (size_t)records[i] * pool_stride(pool);
            uint64_t at = p->offset + (uint64_t)experts[i] * p->slice_bytes;
            CHECK(memcmp(data, files[0].content + at, p->slice_bytes) == 0);
        }
    }
}

static void
test_records_hold_the_experts_asked_for(size_t slice_bytes, enum policy_kind policy,
                                        size_t n_records)
{
    struct pool_layer layers[N_LAYERS];
    describe(layers, slice_bytes);
    struct pool *pool = create(layers, policy, n_records);
    int32_t experts[N_USED], records[N_USED];
    for (unsigned i = 0; i < 60; i++) {
        choose(experts, N_USED);
        CHECK(pool_take(pool, i % N_LAYERS, experts, N_USED, records) == 0);
        if (i % 3 == 1) {
            int32_t guesses[2];
            choose(guesses, 2);
            pool_guess(pool, (i + 1) % N_LAYERS, guesses, 2);
        } else if (i % 7 == 2) {
            pool_guess_all(pool, (i + 1) % N_LAYERS);
        }
        check_bytes(pool, layers, i % N_LAYERS, experts, records, N_USED);
    }
    const struct pool_stats *stats = pool_get_stats(pool);
    CHECK(atomic_load(&stats->n_hits) > 0 || n_records == N_USED);
    if (n_records >= (size_t)N_LAYERS * N_EXPERTS) {
        CHECK(atomic_load(&stats->n_evictions) == 0);
    }
    pool_destroy(pool);
}

static void
test_free_records_are_filled_with_what_was_used_most(void)
{
    struct pool_layer layers[N_LAYERS];
    describe(layers, 8192);
    struct pool *pool = create(layers, POLICY_LRU, 5);
    uint32_t uses[N_LAYERS * N_EXPERTS];
    CHECK(pool_n_experts(pool) == N_LAYERS * N_EXPERTS);
    /* Expert 2 of layer 1 twice; one is no expert; there is no room for the last ones. */
    const uint32_t wanted[] = {N_EXPERTS + 2, 3, N_EXPERTS + 2, UINT32_MAX, 4, 5, 6, 7};
    CHECK(pool_fill(pool, wanted, sizeof wanted / sizeof *wanted) == 5);
    CHECK(pool_fill(pool, wanted, 3) == 0);
    int32_t experts[] = {2, 2}, records[2];
    CHECK(pool_take(pool, 1, experts, 2, records) == 0);
    check_bytes(pool, layers, 1, experts, records, 2);
    const struct pool_stats *stats = pool_get_stats(pool);
    CHECK(atomic_load(&stats->n_hits) == 1 && atomic_load(&stats->n_misses) == 0);
    pool_get_uses(pool, uses);
    for (uint32_t i = 0; i < N_LAYERS * N_EXPERTS; i++) {
        CHECK(uses[i] == (i == N_EXPERTS + 2));
    }
    pool_destroy(pool);
}

static void
test_a_pool_may_shrink_and_grow_again_while_it_is_used(void)
{
    struct pool_layer layers[N_LAYERS];
    describe(layers, 8192);
    enum { N_MOST = N_LAYERS * N_EXPERTS };
    struct pool *pool = create(layers, POLICY_LRFU, N_MOST);
    size_t all_bytes = pool_resident_bytes(pool);
    CHECK(pool_resize(pool, 0) == -EINVAL && pool_resize(pool, N_MOST + 1) == -EINVAL);
    for (unsigned i = 0; i < 80; i++) {
        int32_t experts[N_USED], records[N_USED], guesses[2];
        choose(experts, N_USED);
        CHECK(pool_take(pool, i % N_LAYERS, experts, N_USED, records) == 0);
        choose(guesses, 2);
        pool_guess(pool, (i + 1) % N_LAYERS, guesses, 2);
        check_bytes(pool, layers, i % N_LAYERS, experts, records, N_USED);
        if (i % 5 == 4) {
            size_t n = N_USED + next_random(N_MOST - N_USED + 1);
            CHECK(pool_resize(pool, n) == 0);
            CHECK(pool_resident_bytes(pool) == n * pool_stride(pool));
            CHECK(pool_n_records(pool) == N_MOST);
        }
    }
    CHECK(pool_resize(pool, N_MOST) == 0 && pool_resident_bytes(pool) == all_bytes);
    pool_destroy(pool);
}

static void
test_a_fill_that_fails_leaves_its_record_free(void)
{
    struct pool_layer layers[N_LAYERS];
    describe(layers, 8192);
    struct pool *pool = create(layers, POLICY_LRU, 5);
    bad = (off_t)(layers[0].parts[0].offset + 3 * 8192);
    const uint32_t wanted[] = {3, 5};
    CHECK(pool_fill(pool, wanted, 2) == 1);
    bad = 0;
    CHECK(pool_fill(pool, wanted, 2) == 1);
    int32_t experts[] = {3, 5}, records[2];
    CHECK(pool_take(pool, 0, experts, 2, records) == 0);
    check_bytes(pool, layers, 0, experts, records, 2);
    pool_destroy(pool);
}

static void
test_what_does_not_fit_is_refused_and_leaves_the_pool_usable(void)
{
    struct pool_layer layers[N_LAYERS];
    describe(layers, 8192);
    struct pool *pool = create(layers, POLICY_LRU, 5);
    int32_t experts[N_EXPERTS], records[N_EXPERTS];
    for (unsigned i = 0; i < N_EXPERTS; i++) {
        experts[i] = (int32_t)i;
    }
    CHECK(pool_take(pool, 1, experts, 6, records) == -ENOSPC);
    CHECK(pool_take(pool, 1, experts, 5, records) == 0);
    check_bytes(pool, layers, 1, experts, records, 5);
    experts[2] = N_EXPERTS;
    CHECK(pool_take(pool, 1, experts, 3, records) == -EINVAL);
    experts[2] = -1;
    CHECK(pool_take(pool, 1, experts, 3, records) == -EINVAL);
    CHECK(pool_take(pool, N_LAYERS, experts, 1, records) == -EINVAL);
    pool_destroy(pool);
}

static void
test_guesses_are_used_and_wrong_ones_are_in_nobodys_way(void)
{
    struct pool_layer layers[N_LAYERS];
    describe(layers, 8192);
    struct pool *pool = create(layers, POLICY_LRU, 2 * N_USED);
    int32_t experts[] = {0, 1, 2, 3}, wrong[] = {8, 9}, records[N_USED];
    for (unsigned i = 0; i < 50; i++) {
        CHECK(pool_take(pool, i % N_LAYERS, experts, N_USED, records) == 0);
        check_bytes(pool, layers, i % N_LAYERS, experts, records, N_USED);
        pool_guess_all(pool, (i + 1) % N_LAYERS);
        pool_guess(pool, (i + 2) % N_LAYERS, wrong, 2);
    }
    const struct pool_stats *stats = pool_get_stats(pool);
    CHECK(atomic_load(&stats->n_useful) > 0);
    CHECK(atomic_load(&stats->n_late) <= atomic_load(&stats->n_useful));
    pool_destroy(pool);
}

static void
test_a_step_given_up_while_it_is_read_leaves_the_pool_usable(void)
{
    struct pool_layer layers[N_LAYERS];
    describe(layers, 8192 + 96);
    struct pool *pool = create(layers, POLICY_LRU, 6);
    int32_t experts[N_USED], records[N_USED];
    for (unsigned i = 0; i < 20; i++) {
        choose(experts, N_USED);
        CHECK(pool_take(pool, i % N_LAYERS, experts, N_USED, records) == 0);
        if (i % 3 == 0) {
            pool_release(pool);
        }
    }
    CHECK(pool_take(pool, 0, experts, N_USED, records) == 0);
    check_bytes(pool, layers, 0, experts, records, N_USED);
    CHECK(pool_take(pool, 2, experts, N_USED, records) == 0);
    pool_destroy(pool);
}

static void
test_a_failed_read_is_a_fault_and_is_read_again(unsigned part)
{
    struct pool_layer layers[N_LAYERS];
    describe(layers, 8192);
    struct pool *pool = create(layers, POLICY_LRU, 8);
    int32_t experts[] = {3, 7, 3, 5}, records[4];
    const struct pool_part *p = &layers[1].parts[part];
    bad = (off_t)(p->offset + 7 * p->slice_bytes + 4000);
    CHECK(pool_take(pool, 1, experts, 4, records) == 0);
    struct fault fault = {0};
    for (unsigned i = 0; i < part; i++) {
        CHECK(pool_wait(pool, i, &fault) == 0);
    }
    CHECK(pool_wait(pool, part, &fault) == -EIO);
    CHECK(fault.error == -EIO && fault.file == 0);
    CHECK(fault.offset == p->offset + 7 * p->slice_bytes && fault.len == p->slice_bytes);
    bad = 0;
    CHECK(pool_take(pool, 1, experts, 4, records) == 0);
    check_bytes(pool, layers, 1, experts, records, 4);
    pool_destroy(pool);
}

static void
test_a_file_that_changes_is_a_fault(void)
{
    struct pool_layer layers[N_LAYERS];
    describe(layers, 8192);
    struct pool *pool = create(layers, POLICY_LRU, 8);
    int32_t experts[] = {1, 2}, records[2];
    FILE *file = fopen(files[0].path, "ab");
    CHECK(file != NULL && fputc('x', file) == 'x' && fclose(file) == 0);
    CHECK(pool_take(pool, 0, experts, 2, records) == 0);
    struct fault fault = {0};
    CHECK(pool_wait(pool, 0, &fault) == -ESTALE && fault.error == -ESTALE);
    pool_destroy(pool);
}

int
main(void)
{
    make_file(0, SIZE);
    const char *paths[] = {files[0].path};
    unsigned failed;
    CHECK(source_open(&source, paths, 1, 3, false, &failed) == 0);
    const size_t sizes[] = {8192, 8192 + 96, 4096 * 3 + 2048};
    const size_t n_records[] = {N_USED, 7, (size_t)N_LAYERS * N_EXPERTS};
    for (unsigned i = 0; i < 27; i++) {
        test_records_hold_the_experts_asked_for(sizes[i % 3], (enum policy_kind)(i / 3 % 3),
                                                n_records[i / 9]);
    }
    test_what_does_not_fit_is_refused_and_leaves_the_pool_usable();
    test_free_records_are_filled_with_what_was_used_most();
    test_a_fill_that_fails_leaves_its_record_free();
    test_a_pool_may_shrink_and_grow_again_while_it_is_used();
    test_guesses_are_used_and_wrong_ones_are_in_nobodys_way();
    test_a_step_given_up_while_it_is_read_leaves_the_pool_usable();
    for (unsigned part = 0; part < N_PARTS; part++) {
        test_a_failed_read_is_a_fault_and_is_read_again(part);
    }
    test_a_file_that_changes_is_a_fault();
    source_close(source);
    return 0;
}
