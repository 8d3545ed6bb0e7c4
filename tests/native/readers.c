/* readers.h against plain memory: many batches, several submitters, errors, the end.
 *
 * Exit status: 0 passed, 1 failed. Runs under ASan and UBSan, and under TSan.
 */

#define _GNU_SOURCE  /* RTLD_NEXT */

#include "check.h"
#include "readers.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SIZE ((size_t)5 * 1024 * 1024 + 123)
#define N_REQUESTS 40
#define N_SUBMITTERS 4

static ssize_t (*real_pread)(int, void *, size_t, off_t);
static off_t hole;  /* reads at it find the end of the file, if not 0 */

ssize_t
pread(int fd, void *data, size_t len, off_t offset)
{
    return hole != 0 && offset == hole ? 0 : real_pread(fd, data, len, offset);
}

static char path[4096];
static unsigned char *content;
static struct direct_file file;

static void
remove_file(void)
{
    (void)unlink(path);
}

static uint64_t
cpu_ns(void)
{
    struct timespec now;
    CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now) == 0);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct readers *
create(unsigned n_threads)
{
    struct readers *pool;
    CHECK(readers_create(&pool, n_threads) == 0);
    return pool;
}

static void
read_batch(struct readers *pool, struct readers_batch *batch)
{
    readers_submit(pool, batch);
    readers_wait(pool, batch);
}

/* Read N_REQUESTS ranges of all kinds, the first one the whole file, in one batch. */
static void
check_batch(struct readers *pool, unsigned seed)
{
    struct readers_request requests[N_REQUESTS];
    struct readers_batch batch = {0};
    for (size_t i = 0; i < N_REQUESTS; i++) {
        seed = seed * 1664525u + 1013904223u;
        size_t offset = i == 0 ? 0 : (seed >> 8) % (SIZE + 5000);
        size_t len = i == 0 ? SIZE : i % 5 == 0 ? 0 : (seed >> 4) % 30000;
        requests[i] = (struct readers_request){
            .file = &file, .offset = offset, .len = len, .data = malloc(len + 1)};
        CHECK(requests[i].data != NULL);
        readers_batch_add(&batch, &requests[i]);
    }
    read_batch(pool, &batch);
    for (size_t i = 0; i < N_REQUESTS; i++) {
        const struct readers_request *r = &requests[i];
        size_t left = r->offset < SIZE ? SIZE - (size_t)r->offset : 0;
        size_t n = r->len < left ? r->len : left;
        CHECK(r->result == (ssize_t)n);
        CHECK(n == 0 || memcmp(r->data, content + r->offset, n) == 0);
        free(r->data);
    }
}

static void
test_batches_are_read_byte_for_byte(unsigned n_threads)
{
    struct readers *pool = create(n_threads);
    for (unsigned seed = 0; seed < 5; seed++) {
        check_batch(pool, seed);
    }
    readers_destroy(pool);
}

static void *
run_submitter(void *pool)
{
    for (unsigned seed = 0; seed < 10; seed++) {
        check_batch(pool, seed);
    }
    return NULL;
}

static void
test_threads_may_submit_at_once(void)
{
    struct readers *pool = create(3);
    pthread_t submitters[N_SUBMITTERS];
    for (size_t i = 0; i < N_SUBMITTERS; i++) {
        CHECK(pthread_create(&submitters[i], NULL, run_submitter, pool) == 0);
    }
    for (size_t i = 0; i < N_SUBMITTERS; i++) {
        CHECK(pthread_join(submitters[i], NULL) == 0);
    }
    readers_destroy(pool);
}

static void
test_empty_batch_is_done_at_once(void)
{
    struct readers *pool = create(1);
    struct readers_batch none = {0};
    read_batch(pool, &none);
    struct readers_request request = {.file = &file, .result = -1};
    struct readers_batch empty = {0};
    readers_batch_add(&empty, &request);
    read_batch(pool, &empty);
    CHECK(request.result == 0);
    CHECK(readers_get_stats(pool).n_reads == 0);
    readers_destroy(pool);
}

static void
test_failed_request_leaves_the_others_alone(void)
{
    struct direct_file closed;
    CHECK(direct_open(&closed, "/nonexistent", 0) == -ENOENT);
    unsigned char *data = malloc(SIZE + 2);
    CHECK(data != NULL);
    struct readers_request requests[] = {
        {.file = &file, .len = 1, .data = data + SIZE},
        {.file = &closed, .len = SIZE, .data = data},
        {.file = &file, .len = 1, .data = data + SIZE + 1, .offset = 1},
    };
    struct readers_batch batch = {0};
    for (size_t i = 0; i < 3; i++) {
        readers_batch_add(&batch, &requests[i]);
    }
    struct readers *pool = create(1);
    read_batch(pool, &batch);
    CHECK(requests[0].result == 1 && data[SIZE] == content[0]);
    CHECK(requests[1].result == -EBADF);
    CHECK(requests[2].result == 1 && data[SIZE + 1] == content[1]);
    /* The first piece failed; the other five were not tried. */
    CHECK(readers_get_stats(pool).n_reads == 3);
    CHECK(readers_get_stats(pool).bytes_read == 2);
    readers_destroy(pool);
    free(data);
}

static void
test_bytes_behind_a_gap_do_not_count(void)
{
    struct readers *pool = create(2);
    unsigned char *data = malloc(SIZE);
    CHECK(data != NULL);
    struct readers_request request = {.file = &file, .len = SIZE, .data = data};
    struct readers_batch batch = {0};
    readers_batch_add(&batch, &request);
    hole = 2 * (off_t)READERS_PIECE_BYTES;
    read_batch(pool, &batch);
    CHECK(request.result == hole);
    hole = 0;
    readers_destroy(pool);
    free(data);
}

static void
test_destroy_reads_what_was_submitted(void)
{
    struct readers *pool = create(2);
    unsigned char *data = malloc(SIZE);
    CHECK(data != NULL);
    struct readers_request request = {.file = &file, .len = SIZE, .data = data};
    struct readers_batch batch = {0};
    readers_batch_add(&batch, &request);
    readers_submit(pool, &batch);
    readers_destroy(pool);
    CHECK(request.result == (ssize_t)SIZE && memcmp(data, content, SIZE) == 0);
    free(data);
}

static void
test_counters_tell_what_was_read_and_idle_threads_sleep(void)
{
    struct readers *pool = create(4);
    unsigned char *data = malloc(SIZE);
    CHECK(data != NULL);
    struct readers_request request = {.file = &file, .len = SIZE, .data = data};
    struct readers_batch batch = {0};
    readers_batch_add(&batch, &request);
    read_batch(pool, &batch);
    struct readers_stats stats = readers_get_stats(pool);
    CHECK(stats.bytes_read == SIZE && stats.n_reads == 6 && stats.busy_ns > 0);

    uint64_t before_ns = cpu_ns();
    (void)nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    CHECK(cpu_ns() - before_ns < 50000000);
    CHECK(readers_get_stats(pool).busy_ns == stats.busy_ns);
    readers_destroy(pool);
    free(data);
}

static void
test_number_of_threads_has_limits(void)
{
    struct readers *pool;
    CHECK(readers_create(&pool, 0) == -EINVAL && pool == NULL);
    CHECK(readers_create(&pool, READERS_MAX_THREADS + 1) == -EINVAL && pool == NULL);
    readers_destroy(NULL);
}

int
main(void)
{
    *(void **)&real_pread = dlsym(RTLD_NEXT, "pread");
    CHECK(real_pread != NULL);
    content = malloc(SIZE);
    CHECK(content != NULL);
    for (size_t i = 0; i < SIZE; i++) {
        content[i] = (unsigned char)(i * 31 + i / 256 + i / 65536);
    }
    const char *folder = getenv("TMPDIR");
    (void)snprintf(path, sizeof path, "%s/headrace-readers-XXXXXX",
                   folder != NULL ? folder : "/var/tmp");
    int writer = mkstemp(path);
    CHECK(writer >= 0 && atexit(remove_file) == 0);
    CHECK(pwrite(writer, content, SIZE, 0) == (ssize_t)SIZE);

    const unsigned modes[] = {0, DIRECT_BUFFERED | DIRECT_DROP_CACHE};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        CHECK(direct_open(&file, path, modes[i]) == 0);
        test_batches_are_read_byte_for_byte(1);
        test_batches_are_read_byte_for_byte(4);
        test_threads_may_submit_at_once();
        test_empty_batch_is_done_at_once();
        test_failed_request_leaves_the_others_alone();
        test_bytes_behind_a_gap_do_not_count();
        test_destroy_reads_what_was_submitted();
        test_counters_tell_what_was_read_and_idle_threads_sleep();
        direct_close(&file);
    }
    test_number_of_threads_has_limits();

    free(content);
    CHECK(close(writer) == 0);
    return 0;
}
