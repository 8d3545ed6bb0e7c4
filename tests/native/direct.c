/* direct.h against plain memory, with the kernel's faults played by a pread of our own.
 *
 * Exit status: 0 passed, 1 failed, 77 not all could be tested: the folder of the test
 * file ($TMPDIR, else /var/tmp) is on a file system that refuses O_DIRECT.
 */

#define _GNU_SOURCE  /* RTLD_NEXT, mincore */

#include "check.h"
#include "direct.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#define SIZE ((size_t)300001)
#define TMPFS_MAGIC 0x01021994

static struct {
    unsigned n_interrupts;  /* this many calls fail with EINTR first */
    size_t max_bytes;       /* no call returns more, if not 0 */
    int error;              /* every call fails with it, if not 0 */
} fault;

/* Whose reads must be aligned; some kernels take others too, and some disks don't. */
static const struct direct_file *watched;

static ssize_t (*real_pread)(int, void *, size_t, off_t);

ssize_t
pread(int fd, void *data, size_t len, off_t offset)
{
    if (watched != NULL && watched->is_direct) {
        CHECK(offset % (off_t)watched->block_bytes == 0);
        CHECK(len % watched->block_bytes == 0);
        CHECK((uintptr_t)data % watched->memory_align_bytes == 0);
    }
    if (fault.n_interrupts > 0) {
        fault.n_interrupts--;
        errno = EINTR;
        return -1;
    }
    if (fault.error != 0) {
        errno = fault.error;
        return -1;
    }
    if (fault.max_bytes != 0 && len > fault.max_bytes) {
        len = fault.max_bytes;
    }
    return real_pread(fd, data, len, offset);
}

static char path[4096];
static int writer;
static unsigned char content[SIZE];
static struct direct_bounce bounce;

static void
write_content(void)
{
    unsigned x = 1;
    for (size_t i = 0; i < SIZE; i++) {
        x = x * 1664525u + 1013904223u;
        content[i] = (unsigned char)(x >> 24);
    }
    CHECK(pwrite(writer, content, SIZE, 0) == (ssize_t)SIZE);
    CHECK(fsync(writer) == 0);
}

static void
remove_file(void)
{
    (void)unlink(path);
}

static size_t
expected_bytes(size_t len, uint64_t offset)
{
    size_t left = offset < SIZE ? SIZE - (size_t)offset : 0;
    return len < left ? len : left;
}

/* Read into memory that ends with the range, misaligned by skew, for ASan to watch. */
static void
check_read(const struct direct_file *file, size_t len, uint64_t offset, size_t skew)
{
    void *memory;
    CHECK(posix_memalign(&memory, DIRECT_MAX_BLOCK_BYTES, skew + len + 1) == 0);
    unsigned char *data = (unsigned char *)memory + skew;
    data[len] = 0xA5;
    size_t n = expected_bytes(len, offset);
    watched = file;
    CHECK(direct_read_at(file, data, len, offset, &bounce) == (ssize_t)n);
    watched = NULL;
    CHECK(n == 0 || memcmp(data, content + offset, n) == 0);
    CHECK(data[len] == 0xA5);
    free(memory);
}

static void
check_ranges(const struct direct_file *file)
{
    size_t block = file->block_bytes;
    const uint64_t offsets[] = {0,        1,    block - 1, block,    block + 1,
                                SIZE - 1, SIZE, SIZE + 1,  SIZE * 2, SIZE - block};
    const size_t lens[] = {0,         1,         block - 1, block,
                           block + 1, 5 * block, SIZE,      2 * SIZE};
    const size_t skews[] = {0, 1, 8, block - 1, block + 1};
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        for (size_t j = 0; j < sizeof lens / sizeof *lens; j++) {
            for (size_t k = 0; k < sizeof skews / sizeof *skews; k++) {
                check_read(file, lens[j], offsets[i], skews[k]);
            }
        }
    }
}

static void
test_any_range_into_any_memory(unsigned flags)
{
    struct direct_file file;
    CHECK(direct_open(&file, path, flags) == 0);
    CHECK(file.size_bytes == SIZE);
    check_ranges(&file);
    size_t whole = bounce.size_bytes;
    bounce.size_bytes = file.block_bytes;  /* the least that works */
    check_ranges(&file);
    bounce.size_bytes = whole;
    direct_close(&file);
}

static void
test_interrupted_and_short_reads_go_on(unsigned flags)
{
    struct direct_file file;
    CHECK(direct_open(&file, path, flags) == 0);
    fault.max_bytes = file.is_direct ? file.block_bytes : 7;
    for (size_t skew = 0; skew < 2; skew++) {
        fault.n_interrupts = 3;
        check_read(&file, 50000, 1, skew);
        CHECK(fault.n_interrupts == 0);
    }
    fault.max_bytes = 0;
    direct_close(&file);
}

static void
test_read_errors_are_returned(unsigned flags)
{
    struct direct_file file;
    unsigned char byte;
    CHECK(direct_open(&file, path, flags) == 0);
    fault.error = EIO;
    CHECK(direct_read_at(&file, &byte, 1, 0, &bounce) == -EIO);
    fault.error = 0;
    CHECK(direct_read_at(&file, &byte, 1, UINT64_MAX, &bounce) == -EOVERFLOW);
    CHECK(direct_read_at(&file, &byte, 1, INT64_MAX, &bounce) == -EOVERFLOW);
    CHECK(direct_read_at(&file, &byte, SIZE_MAX, 0, &bounce) == -EOVERFLOW);
    direct_close(&file);
    direct_close(&file);
    CHECK(direct_read_at(&file, &byte, 1, 0, &bounce) == -EBADF);
}

static void
test_shrunk_file_gives_short_reads(unsigned flags)
{
    struct direct_file file;
    CHECK(direct_open(&file, path, flags) == 0);
    CHECK(ftruncate(writer, 5000) == 0);
    unsigned char *data = malloc(SIZE);
    CHECK(data != NULL);
    CHECK(direct_read_at(&file, data, SIZE, 0, &bounce) == 5000);
    CHECK(memcmp(data, content, 5000) == 0);
    CHECK(direct_read_at(&file, data, 10, 6000, &bounce) == 0);
    free(data);
    direct_close(&file);
    write_content();
}

static void
test_congruent_blocks_need_no_bounce(void)
{
    struct direct_file file;
    CHECK(direct_open(&file, path, 0) == 0);
    void *memory;
    CHECK(posix_memalign(&memory, DIRECT_MAX_BLOCK_BYTES, 4 * file.block_bytes) == 0);
    size_t len = 3 * file.block_bytes;
    CHECK(direct_read_at(&file, memory, len, file.block_bytes, NULL) == (ssize_t)len);
    CHECK(memcmp(memory, content + file.block_bytes, len) == 0);
    if (file.is_direct) {
        struct direct_bounce small = {.data = bounce.data, .size_bytes = 1};
        struct direct_bounce skewed = {.data = (unsigned char *)bounce.data + 1,
                                       .size_bytes = bounce.size_bytes - 1};
        CHECK(direct_read_at(&file, memory, len, 1, NULL) == -EINVAL);
        CHECK(direct_read_at(&file, memory, len, 1, &small) == -EINVAL);
        CHECK(file.memory_align_bytes == 1
              || direct_read_at(&file, memory, len, 1, &skewed) == -EINVAL);
    }
    free(memory);
    direct_close(&file);
}

static void
test_open_reports_what_is_wrong(void)
{
    struct direct_file file;
    CHECK(direct_open(&file, "/nonexistent", 0) == -ENOENT && file.fd == -1);
    CHECK(direct_open(&file, "/", 0) == -EISDIR && file.fd == -1);
    CHECK(direct_open(&file, "/dev/null", 0) == -EINVAL && file.fd == -1);
}

static void
test_refused_probe_means_buffered_and_broken_probe_fails(void)
{
    struct direct_file file;
    fault.error = EINVAL;
    CHECK(direct_open(&file, path, 0) == 0);
    fault.error = 0;
    CHECK(!file.is_direct);
    check_read(&file, 1000, 1, 1);
    CHECK((fcntl(file.fd, F_GETFL) & O_DIRECT) == 0);
    direct_close(&file);
    fault.error = EIO;
    CHECK(direct_open(&file, path, 0) == -EIO && file.fd == -1);
    fault.error = 0;
}

static size_t
count_cached_pages(void)
{
    unsigned char pages[SIZE / 4096 + 1];
    void *map = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, writer, 0);
    CHECK(map != MAP_FAILED);
    CHECK(mincore(map, SIZE, pages) == 0);
    CHECK(munmap(map, SIZE) == 0);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t n = 0;
    for (size_t i = 0; i < (SIZE + page - 1) / page; i++) {
        n += pages[i] & 1;
    }
    return n;
}

static void
test_buffered_reads_can_leave_no_cache_behind(void)
{
    struct direct_file file;
    CHECK(posix_fadvise(writer, 0, 0, POSIX_FADV_DONTNEED) == 0);
    CHECK(direct_open(&file, path, DIRECT_BUFFERED | DIRECT_DROP_CACHE) == 0);
    check_read(&file, 100, 4090, 0);
    check_read(&file, 50001, 100001, 1);
    check_read(&file, 2 * SIZE, SIZE - 10, 0);
    CHECK(count_cached_pages() == 0);
    direct_close(&file);
    CHECK(direct_open(&file, path, DIRECT_BUFFERED) == 0);
    check_read(&file, 100, 4090, 0);
    CHECK(count_cached_pages() > 0);
    direct_close(&file);
}

int
main(void)
{
    *(void **)&real_pread = dlsym(RTLD_NEXT, "pread");
    CHECK(real_pread != NULL);
    const char *folder = getenv("TMPDIR");
    (void)snprintf(path, sizeof path, "%s/headrace-direct-XXXXXX",
                   folder != NULL ? folder : "/var/tmp");
    writer = mkstemp(path);
    CHECK(writer >= 0 && atexit(remove_file) == 0);
    write_content();
    bounce.size_bytes = 2 * DIRECT_MAX_BLOCK_BYTES;
    CHECK(posix_memalign(&bounce.data, DIRECT_MAX_BLOCK_BYTES, bounce.size_bytes) == 0);

    struct direct_file file;
    CHECK(direct_open(&file, path, 0) == 0);
    bool is_direct = file.is_direct;
    direct_close(&file);
    const unsigned modes[] = {0, DIRECT_BUFFERED, DIRECT_BUFFERED | DIRECT_DROP_CACHE};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        test_any_range_into_any_memory(modes[i]);
        test_interrupted_and_short_reads_go_on(modes[i]);
        test_read_errors_are_returned(modes[i]);
        test_shrunk_file_gives_short_reads(modes[i]);
    }
    test_congruent_blocks_need_no_bounce();
    test_open_reports_what_is_wrong();
    test_refused_probe_means_buffered_and_broken_probe_fails();
    struct statfs fs;
    CHECK(fstatfs(writer, &fs) == 0);
    if (fs.f_type != TMPFS_MAGIC) {  /* whose pages are the file */
        test_buffered_reads_can_leave_no_cache_behind();
    }

    free(bounce.data);
    CHECK(close(writer) == 0);
    if (!is_direct) {
        (void)fprintf(stderr, "skipped: direct reads, refused for %s\n", path);
    }
    return is_direct ? 0 : 77;
}
