/* Time since some start, for measuring. */

#ifndef HEADRACE_CLOCK_H
#define HEADRACE_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t
clock_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#endif
