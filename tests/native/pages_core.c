/* pages.h: memory is there and zeros, also so much that several threads touch it, and again
 * after it was given back.
 *
 * Exit status: 0 passed, 1 failed. Runs under ASan and UBSan, and under TSan.
 */

#define _GNU_SOURCE  /* mincore */

#include "check.h"
#include "pages.h"

#include <stdbool.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((size_t)1024 * 1024)
/* Parts of it are not whole huge pages, whatever the number of threads. */
#define SIZE (206 * MIB)

/* Tell whether there is memory behind all, or behind none, of [start, end) of pages. */
static bool
is_resident(const struct pages *pages, size_t start, size_t end, bool expected)
{
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    size_t n = (end - start) / page_bytes;
    unsigned char *there = malloc(n);
    CHECK(there != NULL);
    CHECK(mincore((unsigned char *)pages->data + start, end - start, there) == 0);
    bool is_so = true;
    for (size_t i = 0; i < n; i++) {
        is_so = is_so && ((there[i] & 1) != 0) == expected;
    }
    free(there);
    return is_so;
}

static void
check_zeros(const struct pages *pages)
{
    const unsigned char *data = pages->data;
    for (size_t i = 0; i < pages->size; i += 512) {
        CHECK(data[i] == 0);
    }
}

int
main(void)
{
    struct pages pages;
    CHECK(pages_map(&pages, SIZE) == 0);
    CHECK(pages.size == SIZE && (size_t)pages.data % PAGES_HUGE_BYTES == 0);
    CHECK(is_resident(&pages, 0, SIZE, true));
    check_zeros(&pages);
    size_t kept = 40 * MIB;
    CHECK(pages_give_back(&pages, kept - 1) == 0);
    CHECK(is_resident(&pages, 0, kept, true) && is_resident(&pages, kept, SIZE, false));
    CHECK(pages_take_back(&pages, kept, SIZE) == 0);
    CHECK(is_resident(&pages, 0, SIZE, true));
    check_zeros(&pages);
    pages_unmap(&pages);
    CHECK(pages.data == NULL && pages.size == 0);
    return 0;
}
