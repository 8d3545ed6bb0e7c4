/* Threads that read: all requests of a batch are issued at once, in their order.
 *
 * In: batches of requests, each a range of an open file and the memory for it. Out: the
 * bytes there, and a result per request. Knows nothing of what the bytes mean.
 *
 * Requests and batches are the caller's memory and stay where they are from submit
 * until wait returns; reading allocates nothing. A request is cut into pieces of up to
 * READERS_PIECE_BYTES, so that one large request keeps every thread busy. Idle threads
 * sleep. Any thread may submit and wait, several at once.
 */

#ifndef HEADRACE_READERS_H
#define HEADRACE_READERS_H

#include "direct.h"

#define READERS_PIECE_BYTES ((size_t)1024 * 1024)
#define READERS_MAX_THREADS 64u

/* What each thread holds to bounce: a piece and a block at either side of it. */
#define READERS_BOUNCE_BYTES (READERS_PIECE_BYTES + 2 * DIRECT_MAX_BLOCK_BYTES)

struct readers;

struct readers_request {
    const struct direct_file *file;
    uint64_t offset;
    size_t len;
    void *data;      /* len bytes; overlaps no other request in flight */
    ssize_t result;  /* set by wait: bytes read, or -errno; as of direct_read_at */
    struct readers_request *next;  /* set by readers_batch_add */
};

/* Initialise with = {0}; fields belong to readers.c. */
struct readers_batch {
    struct readers_request *first;
    struct readers_request *last;
    struct readers_request *issuing;  /* of which the next piece is; NULL: all issued */
    size_t issued_bytes;              /* of that request */
    size_t n_reading;                 /* pieces being read */
    struct readers_batch *next;       /* in the queue */
};

struct readers_stats {
    uint64_t bytes_read;
    uint64_t n_reads;  /* pieces */
    uint64_t busy_ns;  /* time during which at least one piece was being read */
};

/* Start n_threads threads, 1 to READERS_MAX_THREADS (else -EINVAL). They block all
 * signals. Returns 0 and the pool in *out, which the caller destroys, or -errno. */
int readers_create(struct readers **out, unsigned n_threads);

/* End the threads, once all that was submitted is read, and free pool; NULL is none.
 * Blocks. Nobody may submit to the pool or wait on it any more. */
void readers_destroy(struct readers *pool);

/* Append request to a batch that is not submitted. */
void readers_batch_add(struct readers_batch *batch, struct readers_request *request);

/* Queue batch behind those submitted before; does not block. */
void readers_submit(struct readers *pool, struct readers_batch *batch);

/* Queue n batches in their order, as one: threads are woken once. Urgent ones go before
 * all that is queued, but not before what is being read. */
void readers_submit_all(struct readers *pool, struct readers_batch *const *batches,
                        size_t n, bool is_urgent);

/* Take a submitted batch back if nothing of it was issued yet, as if it had not been
 * submitted. Returns whether it was; else it goes on. */
bool readers_cancel(struct readers *pool, struct readers_batch *batch);

/* Return whether every request of a submitted batch has its result: wait won't sleep. */
bool readers_is_finished(struct readers *pool, const struct readers_batch *batch);

/* Sleep until every request of a submitted batch has its result. Then batch is the
 * caller's again; to use it another time, start from = {0}. */
void readers_wait(struct readers *pool, const struct readers_batch *batch);

/* Return what was read since the pool was made. */
struct readers_stats readers_get_stats(struct readers *pool);

#endif
