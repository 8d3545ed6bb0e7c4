#define _POSIX_C_SOURCE 200809L  /* st_mtim */

#include "source.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>

static int
modified_at(const struct direct_file *file, struct timespec *modified, uint64_t *size)
{
    struct stat st;
    if (fstat(file->fd, &st) < 0) {
        return -errno;
    }
    *modified = st.st_mtim;
    *size = (uint64_t)st.st_size;
    return 0;
}

int
source_open(struct source **out, const char *const *paths, unsigned n_files,
            unsigned n_threads, bool is_buffered, unsigned *failed)
{
    *out = NULL;
    *failed = n_files;
    struct source *source = calloc(1, sizeof *source + n_files * sizeof *source->files);
    if (source == NULL) {
        return -ENOMEM;
    }
    unsigned flags = DIRECT_DROP_CACHE | (is_buffered ? DIRECT_BUFFERED : 0u);
    int error = 0;
    while (source->n_files < n_files && error == 0) {
        struct source_file *file = &source->files[source->n_files];
        error = direct_open(&file->file, paths[source->n_files], flags);
        if (error != 0) {
            *failed = source->n_files;
            break;
        }
        source->n_files++;
        uint64_t size;
        error = modified_at(&file->file, &file->modified, &size);
    }
    if (error == 0) {
        error = readers_create(&source->readers, n_threads);
    }
    if (error != 0) {
        source_close(source);
        return error;
    }
    *out = source;
    return 0;
}

void
source_close(struct source *source)
{
    if (source == NULL) {
        return;
    }
    readers_destroy(source->readers);
    for (unsigned i = 0; i < source->n_files; i++) {
        direct_close(&source->files[i].file);
    }
    free(source);
}

static size_t
round_up(size_t n)
{
    return (n + SPAN_ALIGN_BYTES - 1) / SPAN_ALIGN_BYTES * SPAN_ALIGN_BYTES;
}

size_t
span_room(size_t len)
{
    return round_up(len + SPAN_ALIGN_BYTES - 1);
}

void *
span_place(void *room, uint64_t offset)
{
    return (unsigned char *)room + offset % SPAN_ALIGN_BYTES;
}

void
span_set(struct span *span, const struct source *source, unsigned file, uint64_t offset,
         size_t len, void *data)
{
    *span = (struct span){.file = file, .offset = offset, .len = len};
    span->request.file = &source->files[file].file;
    span->request.offset = offset;
    span->request.len = len;
    span->request.data = data;
    /* Both ends of the range would else be read apart, each a block and a copy. */
    if ((uintptr_t)data % SPAN_ALIGN_BYTES == offset % SPAN_ALIGN_BYTES) {
        span->skip = (size_t)(offset % SPAN_ALIGN_BYTES);
        span->request.offset = offset - span->skip;
        span->request.len = round_up(span->skip + len);
        span->request.data = (unsigned char *)data - span->skip;
    }
}

int
span_check(const struct span *span, const struct source *source, struct fault *fault)
{
    const struct source_file *file = &source->files[span->file];
    int error = 0;
    struct timespec modified = {0};
    uint64_t size = 0;
    if (span->request.result < 0) {
        error = (int)span->request.result;
    } else if ((size_t)span->request.result < span->skip + span->len) {
        error = -ENODATA;
    } else {
        error = modified_at(&file->file, &modified, &size);
        if (error == 0
            && (size != file->file.size_bytes
                || modified.tv_sec != file->modified.tv_sec
                || modified.tv_nsec != file->modified.tv_nsec)) {
            error = -ESTALE;
        }
    }
    if (error != 0 && fault->error == 0) {
        *fault = (struct fault){error, span->file, span->offset, span->len};
    }
    return error;
}
