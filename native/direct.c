#define _GNU_SOURCE  /* O_DIRECT, statx */

#include "direct.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8 && sizeof(size_t) == 8, "a 64-bit system");

#ifndef POSIX_FADV_DONTNEED
/* macOS has no such advice: what is read through the page cache stays there. */
enum { POSIX_FADV_RANDOM, POSIX_FADV_DONTNEED };

static inline int
posix_fadvise(int fd, off_t offset, off_t len, int advice)
{
    (void)fd, (void)offset, (void)len, (void)advice;
    return ENOTSUP;
}
#endif

/* Where the kernel does not tell: the largest logical block of common disks. */
#define DEFAULT_BLOCK_BYTES ((size_t)4096)

/* A bounced read may go past its range by less than a block at either side. */
#define MAX_END ((uint64_t)INT64_MAX - DIRECT_MAX_BLOCK_BYTES)

static const struct direct_file closed_file = {
    .fd = -1,
    .block_bytes = DEFAULT_BLOCK_BYTES,
    .memory_align_bytes = 1,
};

static inline bool
is_alignment(size_t n)
{
    return n != 0 && (n & (n - 1)) == 0 && n <= DIRECT_MAX_BLOCK_BYTES;
}

static inline bool
is_aligned(const void *data, size_t align)
{
    return ((uintptr_t)data & (align - 1)) == 0;
}

/* One pread, again if a signal came first. */
static ssize_t
read_once(const struct direct_file *file, void *data, size_t len, uint64_t offset)
{
    ssize_t n;
    do {
        n = pread(file->fd, data, len, (off_t)offset);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n;
}

#ifdef F_NOCACHE

/* Make reads of file direct. fcntl(2) of macOS: data caching is turned off for the
 * descriptor; blocks need no alignment, whole pages are read without a copy. */
static int
start_direct(struct direct_file *file)
{
    if (fcntl(file->fd, F_NOCACHE, 1) < 0) {
        return errno == ENOTSUP ? 0 : -errno;
    }
    file->block_bytes = DEFAULT_BLOCK_BYTES;
    file->memory_align_bytes = DEFAULT_BLOCK_BYTES;
    file->is_direct = true;
    return 0;
}

#else

/* Set the alignments that direct reads of file need. False: there are no such reads. */
static bool
find_alignment(struct direct_file *file)
{
    file->block_bytes = DEFAULT_BLOCK_BYTES;
    file->memory_align_bytes = DEFAULT_BLOCK_BYTES;
#ifdef STATX_DIOALIGN
    struct statx st;
    if (statx(file->fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0
        && (st.stx_mask & STATX_DIOALIGN) != 0) {
        /* statx(2): both are 0 if direct I/O is not supported on this file. */
        file->block_bytes = st.stx_dio_offset_align;
        file->memory_align_bytes = st.stx_dio_mem_align;
    }
#endif
    return is_alignment(file->block_bytes) && is_alignment(file->memory_align_bytes);
}

/* Read the first block of file with O_DIRECT: some file systems refuse only there. */
static int
probe(const struct direct_file *file)
{
    void *block;
    int error = posix_memalign(&block, DIRECT_MAX_BLOCK_BYTES, file->block_bytes);
    if (error != 0) {
        return -error;
    }
    ssize_t n = read_once(file, block, file->block_bytes, 0);
    free(block);
    return n < 0 ? (int)n : 0;
}

/* Make reads of file direct, or leave it buffered if it can't be read directly. */
static int
start_direct(struct direct_file *file)
{
    int status = fcntl(file->fd, F_GETFL);
    if (status < 0) {
        return -errno;
    }
    int error = -EINVAL;
    if (find_alignment(file)) {
        error = fcntl(file->fd, F_SETFL, status | O_DIRECT) < 0 ? -errno : probe(file);
    }
    if (error == 0) {
        file->is_direct = true;
        return 0;
    }
    file->block_bytes = closed_file.block_bytes;
    file->memory_align_bytes = closed_file.memory_align_bytes;
    if (error != -EINVAL && error != -EOPNOTSUPP) {
        return error;
    }
    return fcntl(file->fd, F_SETFL, status) < 0 ? -errno : 0;
}

#endif

int
direct_open(struct direct_file *file, const char *path, unsigned flags)
{
    *file = closed_file;
    file->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0) {
        return -errno;
    }
    int error = 0;
    struct stat st;
    if (fstat(file->fd, &st) < 0) {
        error = -errno;
        goto out;
    }
    if (!S_ISREG(st.st_mode)) {
        error = S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL;
        goto out;
    }
    file->size_bytes = (uint64_t)st.st_size;
    if ((flags & DIRECT_BUFFERED) == 0) {
        error = start_direct(file);
    }
    if (error == 0 && !file->is_direct && (flags & DIRECT_DROP_CACHE) != 0) {
        file->drops_cache = true;
        /* Pages read ahead of a range would stay: nobody drops them. Only advice. */
        (void)posix_fadvise(file->fd, 0, 0, POSIX_FADV_RANDOM);
    }
out:
    if (error != 0) {
        direct_close(file);
    }
    return error;
}

/* Read the blocks around the range into bounce and copy it, or its first part. */
static ssize_t
read_bounced(const struct direct_file *file, unsigned char *data, size_t len,
             uint64_t offset, const struct direct_bounce *bounce)
{
    size_t block = file->block_bytes;
    if (bounce == NULL || bounce->size_bytes < block
        || !is_aligned(bounce->data, file->memory_align_bytes)) {
        return -EINVAL;
    }
    size_t skip = (size_t)(offset % block);
    size_t span = bounce->size_bytes - bounce->size_bytes % block;
    if (len < span - skip) {
        span = (skip + len + block - 1) / block * block;
    }
    ssize_t n = read_once(file, bounce->data, span, offset - skip);
    if (n <= (ssize_t)skip) {
        return n < 0 ? n : 0;
    }
    size_t n_found = (size_t)n - skip;
    size_t n_copied = n_found < len ? n_found : len;
    memcpy(data, (const unsigned char *)bounce->data + skip, n_copied);
    return (ssize_t)n_copied;
}

/* Read the range, or its first part, with one pread. */
static ssize_t
read_some(const struct direct_file *file, unsigned char *data, size_t len,
          uint64_t offset, const struct direct_bounce *bounce)
{
    if (!file->is_direct) {
        return read_once(file, data, len, offset);
    }
    size_t block = file->block_bytes;
    size_t head = (size_t)((block - offset % block) % block);
    if (len < head + block || !is_aligned(data + head, file->memory_align_bytes)) {
        return read_bounced(file, data, len, offset, bounce);
    }
    if (head > 0) {
        return read_bounced(file, data, head, offset, bounce);
    }
    return read_once(file, data, len - len % block, offset);
}

/* Drop the pages of a range that was read, those at its borders too. */
static void
drop_cache(const struct direct_file *file, uint64_t offset, size_t len)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t start = offset / page * page;
    uint64_t end = (offset + len + page - 1) / page * page;
    /* posix_fadvise(2): partial pages are kept, hence the rounding. Only advice. */
    (void)posix_fadvise(file->fd, (off_t)start, (off_t)(end - start),
                        POSIX_FADV_DONTNEED);
}

ssize_t
direct_read_at(const struct direct_file *file, void *data, size_t len, uint64_t offset,
               const struct direct_bounce *bounce)
{
    if (file->fd < 0) {
        return -EBADF;
    }
    if (len > MAX_END || offset > MAX_END - len) {
        return -EOVERFLOW;
    }
    size_t done = 0;
    while (done < len) {
        ssize_t n = read_some(file, (unsigned char *)data + done, len - done,
                              offset + done, bounce);
        if (n < 0) {
            return n;
        }
        if (n == 0) {
            break;
        }
        done += (size_t)n;
    }
    if (file->drops_cache && done > 0) {
        drop_cache(file, offset, done);
    }
    return (ssize_t)done;
}

void
direct_close(struct direct_file *file)
{
    if (file->fd >= 0) {
        (void)close(file->fd);
        file->fd = -1;
    }
}
