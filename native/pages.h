/* Memory that stays: mapped once on huge pages, touched once, given back at the end or
 * when the machine has too little.
 *
 * Failures are negative errno values.
 */

#ifndef HEADRACE_PAGES_H
#define HEADRACE_PAGES_H

#include <stddef.h>

#define PAGES_HUGE_BYTES ((size_t)2 * 1024 * 1024)

struct pages {
    void *data;   /* a multiple of PAGES_HUGE_BYTES; NULL: none */
    size_t size;  /* a multiple of PAGES_HUGE_BYTES */
};

/* Map at least size bytes of zeros, all resident. Returns 0 or -errno. */
int pages_map(struct pages *pages, size_t size);

/* Map a range of at least size bytes that are all the same 2 MiB of memory: for what
 * must be written somewhere and is never read. Returns 0 or -errno. */
int pages_map_sink(struct pages *pages, size_t size);

/* Reserve size bytes of addresses; to touch one of them is a fault. Returns 0 or -errno. */
int pages_reserve(struct pages *pages, size_t size);

/* Give back the memory behind pages from start on, as far as it is whole huge pages; it is
 * zeros when it is touched again. Returns 0 or -errno. */
int pages_give_back(struct pages *pages, size_t start);

/* Have memory behind [start, end) of pages again. Returns 0 or -errno. */
int pages_take_back(struct pages *pages, size_t start, size_t end);

/* Give back what was mapped, if anything. */
void pages_unmap(struct pages *pages);

#endif
