#define _GNU_SOURCE  /* memfd_create, MADV_* */

#include "pages.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  /* Linux 5.14 */
#endif

/* Threads that touch memory, each at least so much of it. */
#define MAX_TOUCHERS 8u
#define LEAST_TOUCH_BYTES ((size_t)64 * 1024 * 1024)

static size_t
round_up(size_t n)
{
    return (n + PAGES_HUGE_BYTES - 1) / PAGES_HUGE_BYTES * PAGES_HUGE_BYTES;
}

int
pages_reserve(struct pages *pages, size_t size)
{
    *pages = (struct pages){0};
    if (size > SIZE_MAX - 2 * PAGES_HUGE_BYTES) {
        return -ENOMEM;
    }
    size = size == 0 ? PAGES_HUGE_BYTES : round_up(size);
    size_t n_mapped = size + PAGES_HUGE_BYTES;
    /* Without MAP_NORESERVE: more memory than there is must be refused when it is made
     * writable, not when the process is killed for touching it. */
    unsigned char *mapped =
        mmap(NULL, n_mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        return -errno;
    }
    size_t head = (PAGES_HUGE_BYTES - (uintptr_t)mapped % PAGES_HUGE_BYTES)
                  % PAGES_HUGE_BYTES;
    if (head > 0) {
        (void)munmap(mapped, head);
    }
    (void)munmap(mapped + head + size, n_mapped - head - size);
    *pages = (struct pages){mapped + head, size};
    return 0;
}

struct touching {
    unsigned char *data;
    size_t size;
    int error;  /* 0 or -errno */
    pthread_t thread;
    bool has_thread;
};

static void *
touch_part(void *argument)
{
    struct touching *part = argument;
    int error;
    do {
        error = madvise(part->data, part->size, MADV_POPULATE_WRITE) < 0 ? errno : 0;
    } while (error == EINTR || error == EAGAIN);
    part->error = -error;
    if (error == EINVAL) {
        size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
        for (size_t i = 0; i < part->size; i += page_bytes) {
            ((volatile unsigned char *)part->data)[i] = 0;
        }
        part->error = 0;
    }
    return NULL;
}

static unsigned
count_touchers(size_t size)
{
    long n_cpus = sysconf(_SC_NPROCESSORS_ONLN);
    size_t n = size / LEAST_TOUCH_BYTES;
    n = n_cpus > 0 && n > (size_t)n_cpus ? (size_t)n_cpus : n;
    return n > MAX_TOUCHERS ? MAX_TOUCHERS : n == 0 ? 1u : (unsigned)n;
}

/* Have memory behind size bytes at data now. The kernel clears pages in the thread that
 * touches them, at about what one core writes, so several do. Returns 0 or -errno. */
static int
touch(unsigned char *data, size_t size)
{
    struct touching parts[MAX_TOUCHERS];
    unsigned n = count_touchers(size);
    size_t part_bytes = round_up((size + n - 1) / n);
    /* A thread inherits the mask: signals stay with the threads that wait for them. */
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    for (unsigned i = 0; i < n; i++) {
        size_t start = i * part_bytes < size ? i * part_bytes : size;
        size_t left = size - start;
        struct touching *part = &parts[i];
        *part = (struct touching){.data = data + start};
        part->size = left < part_bytes ? left : part_bytes;
        part->has_thread =
            i + 1 < n && pthread_create(&part->thread, NULL, touch_part, part) == 0;
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    int error = 0;
    for (unsigned i = 0; i < n; i++) {
        if (!parts[i].has_thread) {
            (void)touch_part(&parts[i]);
        }
    }
    for (unsigned i = 0; i < n; i++) {
        if (parts[i].has_thread) {
            (void)pthread_join(parts[i].thread, NULL);
        }
        error = error == 0 ? parts[i].error : error;
    }
    return error;
}

int
pages_map(struct pages *pages, size_t size)
{
    int error = pages_reserve(pages, size);
    if (error != 0) {
        return error;
    }
    if (mprotect(pages->data, pages->size, PROT_READ | PROT_WRITE) < 0) {
        error = -errno;
    } else {
        /* Only advice: without huge pages all works, slower. */
        (void)madvise(pages->data, pages->size, MADV_HUGEPAGE);
        error = touch(pages->data, pages->size);
    }
    if (error != 0) {
        pages_unmap(pages);
    }
    return error;
}

int
pages_map_sink(struct pages *pages, size_t size)
{
    int error = pages_reserve(pages, size);
    if (error != 0) {
        return error;
    }
    int fd = memfd_create("headrace-sink", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)PAGES_HUGE_BYTES) < 0) {
        error = -errno;
    }
    for (size_t i = 0; i < pages->size && error == 0; i += PAGES_HUGE_BYTES) {
        void *at = (unsigned char *)pages->data + i;
        if (mmap(at, PAGES_HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                 0) == MAP_FAILED) {
            error = -errno;
        }
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    if (error != 0) {
        pages_unmap(pages);
    }
    return error;
}

int
pages_give_back(struct pages *pages, size_t start)
{
    start = round_up(start);
    if (start >= pages->size) {
        return 0;
    }
    unsigned char *data = (unsigned char *)pages->data + start;
    return madvise(data, pages->size - start, MADV_DONTNEED) < 0 ? -errno : 0;
}

int
pages_take_back(struct pages *pages, size_t start, size_t end)
{
    start = start / PAGES_HUGE_BYTES * PAGES_HUGE_BYTES;
    end = round_up(end) < pages->size ? round_up(end) : pages->size;
    return start < end ? touch((unsigned char *)pages->data + start, end - start) : 0;
}

void
pages_unmap(struct pages *pages)
{
    if (pages->data != NULL) {
        (void)munmap(pages->data, pages->size);
        *pages = (struct pages){0};
    }
}
