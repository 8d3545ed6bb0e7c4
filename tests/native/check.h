/* A check that ends a test's program and says where. */

#ifndef HEADRACE_CHECK_H
#define HEADRACE_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            (void)fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                             \
        }                                                                        \
    } while (0)

#endif
