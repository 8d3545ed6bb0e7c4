#define _GNU_SOURCE  /* fopencookie */

#include "vfile.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* glibc asks for a buffer at a time, and after a seek for the one around the position: a
 * larger one would have the bytes before each tensor read again. */
#define STREAM_BUFFER_BYTES ((size_t)4096)
#define WINDOW_BYTES ((size_t)4 * 1024 * 1024)

/* A part of one extent, read or being read. */
struct window {
    uint64_t start;  /* in the virtual file */
    size_t len;      /* 0: unused */
    bool is_reading;
    struct span span;
    struct readers_batch batch;
    unsigned char *room;
    unsigned char *data;
};

struct vfile {
    struct source *source;
    const struct vfile_extent *extents;
    size_t n_extents;
    uint64_t size;
    uint64_t position;
    struct window windows[2];  /* the one at hand, and the one behind it */
    unsigned at_hand;
    const struct vfile_extent *last;  /* extent started before; NULL: none */
    bool is_in_order;                 /* it followed the one before it */
    struct fault fault;
    FILE *stream;
    void *stream_buffer;
};

/* Return the last extent that starts at or before position, or NULL. */
static const struct vfile_extent *
find_extent(const struct vfile *vfile, uint64_t position)
{
    size_t low = 0, high = vfile->n_extents;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (vfile->extents[middle].start <= position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low == 0 ? NULL : &vfile->extents[low - 1];
}

static bool
holds(const struct window *window, uint64_t position)
{
    return window->len > 0 && position >= window->start
           && position - window->start < window->len;
}

/* Start to read the bytes of a file extent from position on. */
static void
start_window(struct vfile *vfile, struct window *window,
             const struct vfile_extent *extent, uint64_t position)
{
    uint64_t left = extent->start + extent->len - position;
    uint64_t offset = extent->offset + (position - extent->start);
    window->start = position;
    window->len = left < WINDOW_BYTES ? (size_t)left : WINDOW_BYTES;
    window->data = span_place(window->room, offset);
    span_set(&window->span, vfile->source, extent->file, offset, window->len,
             window->data);
    window->batch = (struct readers_batch){0};
    readers_batch_add(&window->batch, &window->span.request);
    readers_submit(vfile->source->readers, &window->batch);
    window->is_reading = true;
}

static void
finish_window(struct vfile *vfile, struct window *window)
{
    if (window->is_reading) {
        readers_wait(vfile->source->readers, &window->batch);
        window->is_reading = false;
    }
}

/* Return the first extent of a file from extent on, or the end. */
static const struct vfile_extent *
find_file(const struct vfile *vfile, const struct vfile_extent *extent)
{
    while (extent < vfile->extents + vfile->n_extents && extent->kind != VFILE_FILE) {
        extent++;
    }
    return extent;
}

/* Start to read what is likely wanted after window: the next bytes of its extent, or of
 * the extent behind it if extents were wanted in order so far. */
static void
read_ahead(struct vfile *vfile, struct window *next, const struct window *window)
{
    uint64_t position = window->start + window->len;
    const struct vfile_extent *extent = find_extent(vfile, position - 1);
    if (extent->start + extent->len <= position) {
        extent = find_file(vfile, extent + 1);
        if (!vfile->is_in_order || extent == vfile->extents + vfile->n_extents) {
            return;
        }
        position = extent->start;
    }
    if (!holds(next, position)) {
        finish_window(vfile, next);
        start_window(vfile, next, extent, position);
    }
}

/* Return the window with the bytes at position, or NULL if they can't be read. */
static const struct window *
fill_window(struct vfile *vfile, const struct vfile_extent *extent, uint64_t position)
{
    /* After a seek stdio reads the end of the extent before, too: only starts count. */
    if (position == extent->start) {
        vfile->is_in_order =
            vfile->last == NULL || extent == find_file(vfile, vfile->last + 1);
        vfile->last = extent;
    }
    struct window *window = &vfile->windows[vfile->at_hand];
    struct window *other = &vfile->windows[1 - vfile->at_hand];
    /* stdio comes with every page of it: what was checked once is good. */
    if (holds(window, position) && !window->is_reading && position != extent->start) {
        return window;
    }
    if (!holds(window, position) && holds(other, position)) {
        struct window *swap = window;
        window = other;
        other = swap;
        vfile->at_hand = 1 - vfile->at_hand;
    }
    if (!holds(window, position)) {
        finish_window(vfile, window);
        start_window(vfile, window, extent, position);
    }
    read_ahead(vfile, other, window);
    if (!window->is_reading) {
        return window;
    }
    finish_window(vfile, window);
    if (span_check(&window->span, vfile->source, &vfile->fault) != 0) {
        window->len = 0;
        return NULL;
    }
    return window;
}

/* Read up to len bytes at the position of vfile; of one extent or gap only. */
static ssize_t
read_part(struct vfile *vfile, char *buffer, size_t len)
{
    uint64_t position = vfile->position;
    const struct vfile_extent *extent = find_extent(vfile, position);
    const struct vfile_extent *next = extent == NULL ? vfile->extents : extent + 1;
    if (extent == NULL || position - extent->start >= extent->len) {
        uint64_t end = next < vfile->extents + vfile->n_extents ? next->start : vfile->size;
        size_t n = end - position < len ? (size_t)(end - position) : len;
        memset(buffer, 0, n);
        return (ssize_t)n;
    }
    uint64_t left = extent->start + extent->len - position;
    size_t n = left < len ? (size_t)left : len;
    if (extent->kind == VFILE_MEMORY) {
        memcpy(buffer, (const char *)extent->data + (position - extent->start), n);
    } else if (extent->kind == VFILE_FILE) {
        const struct window *window = fill_window(vfile, extent, position);
        if (window == NULL) {
            return -1;
        }
        size_t skip = (size_t)(position - window->start);
        n = window->len - skip < n ? window->len - skip : n;
        memcpy(buffer, window->data + skip, n);
    }
    return (ssize_t)n;
}

static ssize_t
read_cookie(void *cookie, char *buffer, size_t len)
{
    struct vfile *vfile = cookie;
    size_t done = 0;
    while (done < len && vfile->position < vfile->size) {
        const struct vfile_extent *extent = find_extent(vfile, vfile->position);
        /* Perhaps only stdio's buffer wants these bytes; who does asks again. */
        if (done > 0 && extent != NULL && extent->kind == VFILE_FILE
            && extent->start == vfile->position) {
            break;
        }
        ssize_t n = read_part(vfile, buffer + done, len - done);
        if (n < 0) {
            /* The bytes before it are good and passed: who goes on hears of it then. */
            errno = -vfile->fault.error;
            return done > 0 ? (ssize_t)done : -1;
        }
        done += (size_t)n;
        vfile->position += (uint64_t)n;
    }
    return (ssize_t)done;
}

static int
seek_cookie(void *cookie, off64_t *offset, int whence)
{
    struct vfile *vfile = cookie;
    int64_t base = whence == SEEK_SET   ? 0
                   : whence == SEEK_CUR ? (int64_t)vfile->position
                                        : (int64_t)vfile->size;
    if (*offset < -base || *offset > INT64_MAX - base) {
        errno = EINVAL;
        return -1;
    }
    *offset += base;
    vfile->position = (uint64_t)*offset;
    return 0;
}

int
vfile_create(struct vfile **out, struct source *source,
             const struct vfile_extent *extents, size_t n_extents)
{
    *out = NULL;
    struct vfile *vfile = calloc(1, sizeof *vfile);
    if (vfile == NULL) {
        return -ENOMEM;
    }
    vfile->source = source;
    vfile->extents = extents;
    vfile->n_extents = n_extents;
    if (n_extents > 0) {
        vfile->size = extents[n_extents - 1].start + extents[n_extents - 1].len;
    }
    int error = ENOMEM;
    for (unsigned i = 0; i < 2; i++) {
        void *room;
        if (posix_memalign(&room, SPAN_ALIGN_BYTES, span_room(WINDOW_BYTES)) != 0) {
            goto fail;
        }
        vfile->windows[i].room = room;
    }
    cookie_io_functions_t functions = {.read = read_cookie, .seek = seek_cookie};
    vfile->stream_buffer = malloc(STREAM_BUFFER_BYTES);
    vfile->stream = fopencookie(vfile, "rb", functions);
    if (vfile->stream_buffer == NULL || vfile->stream == NULL) {
        goto fail;
    }
    error = setvbuf(vfile->stream, vfile->stream_buffer, _IOFBF, STREAM_BUFFER_BYTES);
    if (error == 0) {
        *out = vfile;
        return 0;
    }
fail:
    vfile_destroy(vfile);
    return -error;
}

FILE *
vfile_stream(struct vfile *vfile)
{
    return vfile->stream;
}

struct fault
vfile_fault(const struct vfile *vfile)
{
    return vfile->fault;
}

void
vfile_destroy(struct vfile *vfile)
{
    if (vfile == NULL) {
        return;
    }
    if (vfile->stream != NULL) {
        (void)fclose(vfile->stream);
    }
    for (unsigned i = 0; i < 2; i++) {
        finish_window(vfile, &vfile->windows[i]);
        free(vfile->windows[i].room);
    }
    free(vfile->stream_buffer);
    free(vfile);
}
