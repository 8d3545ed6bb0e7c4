/* Reads of one file, past the page cache where the file system allows it.
 *
 * In: a path; then any offset, length and destination. Out: bytes in the caller's
 * memory. Knows nothing of threads (see readers.h), of tensors, or of Python.
 *
 * Failures are negative errno values. One open file may be read from several threads at
 * once; opening and closing it belong to one thread. 64 bits; Linux, and macOS, where it
 * was never run.
 */

#ifndef HEADRACE_DIRECT_H
#define HEADRACE_DIRECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* No file needs more alignment than this: memory aligned to it bounces for them all. */
#define DIRECT_MAX_BLOCK_BYTES ((size_t)64 * 1024)

enum direct_flags {
    DIRECT_BUFFERED = 1,    /* read through the page cache, do not try O_DIRECT */
    DIRECT_DROP_CACHE = 2,  /* buffered reads leave nothing behind in the page cache */
};

/* Fields are read-only for callers; alignments are powers of two. */
struct direct_file {
    int fd;                     /* -1 when closed */
    bool is_direct;             /* false: O_DIRECT was refused, or not asked for */
    bool drops_cache;
    size_t block_bytes;         /* direct reads start and end at multiples of it */
    size_t memory_align_bytes;  /* direct reads land at multiples of it */
    uint64_t size_bytes;        /* when the file was opened */
};

/* Scratch memory for what can't be read in place; one thread at a time. */
struct direct_bounce {
    void *data;         /* a multiple of the file's memory_align_bytes */
    size_t size_bytes;  /* at least the file's block_bytes; more means fewer reads */
};

/* Open the regular file at path and find out, with one read, whether it can be read
 * directly. Where it can't be, the file is read through the page cache: the caller says
 * so, by is_direct. flags: any of enum direct_flags. Blocks.
 *
 * Returns 0, or -errno with *file closed: -EISDIR for a directory, -EINVAL for anything
 * else that is not a regular file. */
int direct_open(struct direct_file *file, const char *path, unsigned flags);

/* Read len bytes at offset into data, which has room for them. Blocks.
 *
 * Whole blocks land in place if their addresses allow it (always, if address and
 * offset are congruent modulo block_bytes and memory_align_bytes); all else is read
 * into bounce and copied. bounce may be NULL if nothing needs it, as in buffered files.
 *
 * Returns the bytes read: fewer than len at the end of the file and nowhere else; only
 * the caller knows whether that end is an error. Or -errno, with data indeterminate:
 * -EBADF closed, -EINVAL bounce missing, misaligned or too small, -EOVERFLOW the range
 * ends beyond what a file can hold. */
ssize_t direct_read_at(const struct direct_file *file, void *data, size_t len,
                       uint64_t offset, const struct direct_bounce *bounce);

/* Close the file, if it is open; no read of it may be running. */
void direct_close(struct direct_file *file);

#endif
