/* A file that is not there: a stream whose bytes are those of other files.
 *
 * In: extents, each a range of memory or of a source's file, or a range that is
 * streamed later. Out: a FILE that llama.cpp loads a model from. Bytes of streamed
 * extents are counted as read and left as they are; gaps are zeros. What is read is
 * read ahead, directly, and leaves nothing in the page cache.
 */

#ifndef HEADRACE_VFILE_H
#define HEADRACE_VFILE_H

#include <stdio.h>

#include "source.h"

enum vfile_kind { VFILE_MEMORY, VFILE_FILE, VFILE_STREAMED };

struct vfile_extent {
    uint64_t start;  /* in the virtual file */
    uint64_t len;
    enum vfile_kind kind;
    const void *data;  /* VFILE_MEMORY: len bytes */
    unsigned file;     /* VFILE_FILE */
    uint64_t offset;   /* VFILE_FILE */
};

struct vfile;

/* Make a virtual file of n_extents extents in ascending order, without overlap. The
 * array stays the caller's and must outlive the file. Returns 0 or -errno. */
int vfile_create(struct vfile **out, struct source *source,
                 const struct vfile_extent *extents, size_t n_extents);

/* Return the stream of vfile, which closes it; one thread at a time. */
FILE *vfile_stream(struct vfile *vfile);

/* Return the first fault of reads through the stream. */
struct fault vfile_fault(const struct vfile *vfile);

/* Close the stream and free everything; NULL is none. */
void vfile_destroy(struct vfile *vfile);

#endif
