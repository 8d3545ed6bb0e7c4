/* Preloaded: pread of a range that holds offset $EIO_AT fails with EIO. */

#define _GNU_SOURCE  /* RTLD_NEXT */

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>

ssize_t
pread(int fd, void *data, size_t len, off_t offset)
{
    ssize_t (*next)(int, void *, size_t, off_t);
    *(void **)&next = dlsym(RTLD_NEXT, "pread");
    const char *text = getenv("EIO_AT");
    if (text != NULL) {
        off_t bad = (off_t)strtoll(text, NULL, 10);
        if (offset <= bad && bad < offset + (off_t)len) {
            errno = EIO;
            return -1;
        }
    }
    return next(fd, data, len, offset);
}
