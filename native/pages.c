#define _GNU_SOURCE  /* memfd_create, MADV_* */

#include "pages.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  /* Linux 5.14 */
#endif

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

/* Have memory behind size bytes at data now. Returns 0 or -errno. */
static int
touch(unsigned char *data, size_t size)
{
    int error;
    do {
        error = madvise(data, size, MADV_POPULATE_WRITE) < 0 ? errno : 0;
    } while (error == EINTR || error == EAGAIN);
    if (error != EINVAL) {
        return -error;
    }
    long page_bytes = sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < size; i += (size_t)page_bytes) {
        ((volatile unsigned char *)data)[i] = 0;
    }
    return 0;
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
