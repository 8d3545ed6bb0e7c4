/* vfile.h through its FILE against plain memory: reads in order and after seeks, over the
 * borders of memory, files, streamed ranges and gaps; files that end; reads that fail.
 *
 * Exit status: 0 passed, 1 failed. Runs under ASan and UBSan, and under TSan.
 */

#define _GNU_SOURCE  /* RTLD_NEXT */

#include "vfile.h"
#include "core_test.h"

#include <string.h>

#define MIB ((size_t)1024 * 1024)
#define HEADER_BYTES ((size_t)1312)
#define TRUNK_BYTES (9 * MIB + 123)  /* more than two of a virtual file's windows */
#define STREAMED_BYTES ((size_t)70001)
#define TRUNK_OFFSET 777u
#define TRUNK_START (HEADER_BYTES + 32)
#define STREAMED_START (TRUNK_START + TRUNK_BYTES)
#define TAIL_START (STREAMED_START + STREAMED_BYTES)
#define SIZE (TAIL_START + 8192 + 100 + 64 + 3 + 5000)

static unsigned char header[HEADER_BYTES];
static const struct vfile_extent extents[] = {
    {0, HEADER_BYTES, VFILE_MEMORY, header, 0, 0},
    {TRUNK_START, TRUNK_BYTES, VFILE_FILE, NULL, 0, TRUNK_OFFSET},
    {STREAMED_START, STREAMED_BYTES, VFILE_STREAMED, NULL, 0, 50},
    {TAIL_START, 8192, VFILE_FILE, NULL, 1, 4096},
    {TAIL_START + 8192 + 100, 64, VFILE_MEMORY, header, 0, 0},
    {TAIL_START + 8192 + 164, 3, VFILE_FILE, NULL, 1, 50001},
    {TAIL_START + 8192 + 167, 5000, VFILE_FILE, NULL, 0, 0},
};
#define N_EXTENTS (sizeof extents / sizeof extents[0])

static unsigned char *image;  /* what the virtual file holds; zeros where it is streamed */
static unsigned char *room;   /* SIZE bytes to read to */

static void
draw_image(void)
{
    image = calloc(1, SIZE);
    room = malloc(SIZE);
    CHECK(image != NULL && room != NULL);
    for (size_t i = 0; i < N_EXTENTS; i++) {
        const struct vfile_extent *e = &extents[i];
        if (e->kind == VFILE_MEMORY) {
            memcpy(image + e->start, e->data, e->len);
        } else if (e->kind == VFILE_FILE) {
            memcpy(image + e->start, files[e->file].content + e->offset, e->len);
        }
    }
}

static void
check_bytes(size_t position, size_t len)
{
    for (size_t i = 0; i < len;) {
        bool is_streamed = position + i >= STREAMED_START && position + i < TAIL_START;
        size_t end = position + i < STREAMED_START ? STREAMED_START
                     : is_streamed                 ? TAIL_START
                                                   : SIZE;
        size_t n = end - (position + i) < len - i ? end - (position + i) : len - i;
        CHECK(is_streamed || memcmp(room + i, image + position + i, n) == 0);
        i += n;
    }
}

static struct source *
open_source(bool is_buffered)
{
    const char *paths[] = {files[0].path, files[1].path};
    struct source *source;
    unsigned failed;
    CHECK(source_open(&source, paths, 2, 3, is_buffered, &failed) == 0);
    return source;
}

static struct vfile *
create(struct source *source, const struct vfile_extent *of, size_t n)
{
    struct vfile *vfile;
    CHECK(vfile_create(&vfile, source, of, n) == 0);
    return vfile;
}

static void
test_reads_in_order_give_all_bytes_but_those_streamed(struct source *source, size_t step)
{
    uint64_t before = readers_get_stats(source->readers).bytes_read;
    struct vfile *vfile = create(source, extents, N_EXTENTS);
    FILE *stream = vfile_stream(vfile);
    size_t position = 0;
    while (position < SIZE) {
        size_t wanted = SIZE - position < step ? SIZE - position : step;
        CHECK(fread(room, 1, wanted, stream) == wanted);
        check_bytes(position, wanted);
        position += wanted;
        CHECK((size_t)ftello(stream) == position);
    }
    CHECK(fread(room, 1, 1, stream) == 0 && feof(stream) && !ferror(stream));
    CHECK(vfile_fault(vfile).error == 0);
    vfile_destroy(vfile);
    /* All was read once, up to a block at either end of each window. */
    uint64_t n_read = readers_get_stats(source->readers).bytes_read - before;
    CHECK(n_read <= SIZE - STREAMED_BYTES + 8 * 2 * SPAN_ALIGN_BYTES);
}

static void
test_reads_after_seeks_give_the_bytes_there(struct source *source)
{
    struct vfile *vfile = create(source, extents, N_EXTENTS);
    FILE *stream = vfile_stream(vfile);
    for (unsigned i = 0; i < 200; i++) {
        const struct vfile_extent *e = &extents[next_random(N_EXTENTS)];
        size_t position = e->start + (i % 2 == 0 ? 0 : next_random((unsigned)e->len));
        int whence = (int[]){SEEK_SET, SEEK_CUR, SEEK_END}[i % 3];
        off_t base = whence == SEEK_SET   ? 0
                     : whence == SEEK_CUR ? ftello(stream)
                                          : (off_t)SIZE;
        CHECK(fseeko(stream, (off_t)position - base, whence) == 0);
        CHECK((size_t)ftello(stream) == position);
        size_t wanted = next_random(i % 5 == 0 ? 300000 : 3000);
        size_t n = SIZE - position < wanted ? SIZE - position : wanted;
        CHECK(fread(room, 1, wanted, stream) == n);
        check_bytes(position, n);
    }
    vfile_destroy(vfile);
}

static void
test_seeks_out_of_the_file_are_as_in_any_file(struct source *source)
{
    struct vfile *vfile = create(source, extents, N_EXTENTS);
    FILE *stream = vfile_stream(vfile);
    errno = 0;
    CHECK(fseeko(stream, -1, SEEK_SET) != 0 && errno == EINVAL);
    errno = 0;
    CHECK(fseeko(stream, -(off_t)SIZE - 1, SEEK_END) != 0 && errno == EINVAL);
    CHECK(fseeko(stream, 10, SEEK_END) == 0);
    CHECK(fread(room, 1, 1, stream) == 0 && feof(stream) && !ferror(stream));
    CHECK(fseeko(stream, -5000, SEEK_END) == 0);
    CHECK(fread(room, 1, 6000, stream) == 5000);
    check_bytes(SIZE - 5000, 5000);
    vfile_destroy(vfile);
}

static void
test_a_file_that_ends_early_is_a_fault(struct source *source)
{
    uint64_t offset = files[1].size - 5000;
    const struct vfile_extent both[] = {
        {0, HEADER_BYTES, VFILE_MEMORY, header, 0, 0},
        {HEADER_BYTES, 8192, VFILE_FILE, NULL, 1, offset},
        {HEADER_BYTES + 8192, 4096, VFILE_FILE, NULL, 1, 0},
    };
    struct vfile *vfile = create(source, both, 3);
    FILE *stream = vfile_stream(vfile);
    CHECK(fread(room, 1, HEADER_BYTES, stream) == HEADER_BYTES);
    CHECK(memcmp(room, header, HEADER_BYTES) == 0);
    CHECK(vfile_fault(vfile).error == 0);  /* of what is only behind it nothing was read */
    errno = 0;
    CHECK(fread(room, 1, 8192, stream) == 0 && ferror(stream) && errno == ENODATA);
    struct fault fault = vfile_fault(vfile);
    CHECK(fault.error == -ENODATA && fault.file == 1);
    CHECK(fault.offset == offset && fault.len == 8192);
    CHECK(fseeko(stream, HEADER_BYTES + 8192, SEEK_SET) == 0);
    CHECK(fread(room, 1, 4096, stream) == 4096);
    CHECK(memcmp(room, files[1].content, 4096) == 0);
    vfile_destroy(vfile);
}

static void
test_a_failed_read_is_a_fault_and_is_read_again(struct source *source)
{
    struct vfile *vfile = create(source, extents, N_EXTENTS);
    FILE *stream = vfile_stream(vfile);
    size_t position = TRUNK_START + 100003;  /* a border of windows is then in a buffer */
    bad = (off_t)(TRUNK_OFFSET + 5 * MIB);  /* in the second window */
    CHECK(fseeko(stream, (off_t)position, SEEK_SET) == 0);
    size_t n = fread(room, 1, TRUNK_BYTES, stream);
    CHECK(n < 5 * MIB && ferror(stream) && errno == EIO);
    check_bytes(position, n);
    CHECK(vfile_fault(vfile).error == -EIO && vfile_fault(vfile).file == 0);
    bad = 0;
    clearerr(stream);
    position += n;
    CHECK((size_t)ftello(stream) == position);
    CHECK(fread(room, 1, SIZE - position, stream) == SIZE - position);
    check_bytes(position, SIZE - position);
    vfile_destroy(vfile);
}

static void
test_a_file_closed_while_it_is_read_ahead_waits_for_that(struct source *source)
{
    for (unsigned i = 0; i < 20; i++) {
        struct vfile *vfile = create(source, extents, N_EXTENTS);
        CHECK(fseeko(vfile_stream(vfile), TRUNK_START + next_random(MIB), SEEK_SET) == 0);
        CHECK(fread(room, 1, 1, vfile_stream(vfile)) == 1);
        vfile_destroy(vfile);
    }
}

static void
test_no_extents_are_an_empty_file(struct source *source)
{
    struct vfile *vfile = create(source, NULL, 0);
    CHECK(fread(room, 1, 1, vfile_stream(vfile)) == 0 && feof(vfile_stream(vfile)));
    vfile_destroy(vfile);
    vfile_destroy(NULL);
}

int
main(void)
{
    make_file(0, 10 * MIB);
    make_file(1, 1 * MIB);
    for (size_t i = 0; i < HEADER_BYTES; i++) {
        header[i] = (unsigned char)next_random(256);
    }
    draw_image();
    for (unsigned is_buffered = 0; is_buffered < 2; is_buffered++) {
        struct source *source = open_source(is_buffered == 1);
        const size_t steps[] = {97, 4096, 100003, SIZE};
        for (unsigned i = 0; i < 4; i++) {
            test_reads_in_order_give_all_bytes_but_those_streamed(source, steps[i]);
        }
        test_reads_after_seeks_give_the_bytes_there(source);
        test_seeks_out_of_the_file_are_as_in_any_file(source);
        test_a_file_that_ends_early_is_a_fault(source);
        test_a_failed_read_is_a_fault_and_is_read_again(source);
        test_a_file_closed_while_it_is_read_ahead_waits_for_that(source);
        test_no_extents_are_an_empty_file(source);
        source_close(source);
    }
    free(room);
    free(image);
    return 0;
}
