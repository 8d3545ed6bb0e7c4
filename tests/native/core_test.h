/* What tests of the core share: numbers that are the same
 * in every run, and files of random bytes whose reads can be made to fail. Included once
 * by a program, which defines _GNU_SOURCE. */

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

#include "check.h"

static ssize_t (*real_pread)(int, void *, size_t, off_t);
static _Atomic off_t bad;  /* reads over it fail with EIO, if not 0 */

ssize_t
pread(int fd, void *data, size_t len, off_t offset)
{
    off_t at = bad;
    if (at != 0 && offset <= at && at < offset + (off_t)len) {
        errno = EIO;
        return -1;
    }
    return real_pread(fd, data, len, offset);
}

static unsigned seed = 1;

static inline unsigned
next_random(unsigned n)
{
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % n;
}

#define MAX_FILES 2u

static struct made_file {
    char path[4096];
    unsigned char *content;
    size_t size;
} files[MAX_FILES];

static inline void
remove_files(void)
{
    for (unsigned i = 0; i < MAX_FILES && files[i].content != NULL; i++) {
        (void)unlink(files[i].path);
        free(files[i].content);
    }
}

/* Make files[i] of random bytes; they go when the program ends. */
static inline void
make_file(unsigned i, size_t size)
{
    *(void **)&real_pread = dlsym(RTLD_NEXT, "pread");
    struct made_file *file = &files[i];
    const char *folder = getenv("TMPDIR");
    (void)snprintf(file->path, sizeof file->path, "%s/core-XXXXXX",
                   folder != NULL ? folder : "/tmp");
    int fd = mkstemp(file->path);
    CHECK(fd >= 0);
    file->size = size;
    file->content = malloc(size);
    CHECK(file->content != NULL && (i > 0 || atexit(remove_files) == 0));
    for (size_t k = 0; k < size; k++) {
        file->content[k] = (unsigned char)next_random(256);
    }
    CHECK(write(fd, file->content, size) == (ssize_t)size && close(fd) == 0);
}
