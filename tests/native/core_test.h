/* What the tests of pool and ring share: a check that ends the program, reads that can be
 * made to fail, and numbers that are the same in every run. Included once by a program. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            (void)fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                             \
        }                                                                        \
    } while (0)

static ssize_t (*real_pread)(int, void *, size_t, off_t);
static off_t bad;  /* reads over it fail with EIO, if not 0 */

ssize_t
pread(int fd, void *data, size_t len, off_t offset)
{
    if (bad != 0 && offset <= bad && bad < offset + (off_t)len) {
        errno = EIO;
        return -1;
    }
    return real_pread(fd, data, len, offset);
}

static unsigned seed = 1;

static unsigned
next_random(unsigned n)
{
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % n;
}
