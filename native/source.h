/* The files of a model, and spans of them on their way to an address.
 *
 * In: paths; then ranges of a file and the memory for them. Out: bytes there, or a
 * fault that says which file failed where and why. A file that changes while it is open
 * is a fault too: its bytes would no longer be those of one model.
 *
 * Failures are negative errno values: -ENODATA is a file that ends within a range,
 * -ESTALE one that was changed.
 */

#ifndef HEADRACE_SOURCE_H
#define HEADRACE_SOURCE_H

#include <time.h>

#include "direct.h"
#include "readers.h"

/* Every span starts and ends at a multiple of it if the file's blocks are no larger. */
#define SPAN_ALIGN_BYTES ((size_t)4096)

struct fault {
    int error;      /* negative errno; 0: none */
    unsigned file;  /* index */
    uint64_t offset;
    size_t len;
};

struct source_file {
    struct direct_file file;
    struct timespec modified;
};

/* Fields are read-only for callers. */
struct source {
    struct readers *readers;
    unsigned n_files;
    struct source_file files[];
};

/* A range of a file and the memory that it goes to; stays where it is while read. */
struct span {
    struct readers_request request;  /* the range, extended to whole blocks if it can be */
    unsigned file;
    uint64_t offset;
    size_t len;
    size_t skip;  /* bytes read before the range */
};

/* Open n_files files and start n_threads reader threads. is_buffered: not directly.
 * Returns 0 and the source in *out, or -errno with the index of the file in *failed
 * (n_files if it is not about a file). */
int source_open(struct source **out, const char *const *paths, unsigned n_files,
                unsigned n_threads, bool is_buffered, unsigned *failed);

/* End the threads and close the files; nothing may be in flight. NULL is none. */
void source_close(struct source *source);

/* Return the bytes that a range of len bytes needs, wherever in a block it starts. */
size_t span_room(size_t len);

/* Return the address within room (a multiple of SPAN_ALIGN_BYTES, span_room bytes) to
 * which a range at offset goes so that it is read without a copy. */
void *span_place(void *room, uint64_t offset);

/* Prepare the read of len bytes at offset of a file to data. If data is congruent to
 * offset, up to a block before data and behind data + len is overwritten. */
void span_set(struct span *span, const struct source *source, unsigned file,
              uint64_t offset, size_t len, void *data);

/* Return 0 if the span, which was read, has all its bytes and its file was not changed;
 * else -errno, with *fault filled in if it was not. */
int span_check(const struct span *span, const struct source *source,
               struct fault *fault);

#endif
