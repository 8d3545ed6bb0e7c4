#define _GNU_SOURCE  /* pthread_setname_np */

#include "readers.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "clock.h"

struct reader {
    pthread_t thread;
    struct readers *pool;
    struct direct_bounce bounce;
};

struct readers {
    pthread_mutex_t lock;  /* of all fields below and of batches in flight */
    pthread_cond_t has_work;
    pthread_cond_t has_result;
    struct readers_batch *first;  /* queue of batches that have pieces to issue */
    struct readers_batch *last;
    size_t n_reading;
    uint64_t busy_since_ns;  /* if n_reading > 0 */
    struct readers_stats stats;
    bool is_stopping;
    unsigned n_threads;
    struct reader threads[];
};

struct piece {
    struct readers_batch *batch;
    struct readers_request *request;
    size_t start;  /* in the request */
    size_t len;
};

static inline bool
is_finished(const struct readers_batch *batch)
{
    return batch->issuing == NULL && batch->n_reading == 0;
}

/* Move past requests of which no piece is left to issue; a failed one has none. */
static void
skip_issued(struct readers_batch *batch)
{
    while (batch->issuing != NULL
           && (batch->issuing->result < 0
               || batch->issued_bytes == batch->issuing->len)) {
        batch->issuing = batch->issuing->next;
        batch->issued_bytes = 0;
    }
}

/* Take batches that are all issued out of the queue; they may be gone soon. */
static void
trim_queue(struct readers *pool)
{
    struct readers_batch **link = &pool->first;
    pool->last = NULL;
    while (*link != NULL) {
        if ((*link)->issuing == NULL) {
            *link = (*link)->next;
        } else {
            pool->last = *link;
            link = &(*link)->next;
        }
    }
}

/* Take the next piece of the first batch; the queue is not empty. */
static struct piece
take_piece(struct readers *pool)
{
    struct readers_batch *batch = pool->first;
    struct readers_request *request = batch->issuing;
    struct piece piece = {
        .batch = batch,
        .request = request,
        .start = batch->issued_bytes,
        .len = request->len - batch->issued_bytes,
    };
    if (piece.len > READERS_PIECE_BYTES) {
        /* Cut between blocks, else both neighbours would read the block of the cut. */
        uint64_t end = request->offset + piece.start + READERS_PIECE_BYTES;
        piece.len = READERS_PIECE_BYTES - (size_t)(end % request->file->block_bytes);
    }
    batch->issued_bytes += piece.len;
    batch->n_reading++;
    skip_issued(batch);
    if (batch->issuing == NULL) {
        trim_queue(pool);
    }
    if (pool->n_reading++ == 0) {
        pool->busy_since_ns = clock_ns();
    }
    return piece;
}

/* Book the result n of piece. The batch may be gone once the lock is released. */
static void
finish_piece(struct readers *pool, const struct piece *piece, ssize_t n)
{
    if (--pool->n_reading == 0) {
        pool->stats.busy_ns += clock_ns() - pool->busy_since_ns;
    }
    pool->stats.n_reads++;
    struct readers_request *request = piece->request;
    if (n < 0) {
        if (request->result >= 0) {
            request->result = n;
        }
        skip_issued(piece->batch);
        trim_queue(pool);
    } else {
        pool->stats.bytes_read += (uint64_t)n;
        /* Bytes behind a gap don't count: the file may shrink while it is read. */
        ssize_t end = (ssize_t)piece->start + n;
        if ((size_t)n < piece->len && end < request->result) {
            request->result = end;
        }
    }
    piece->batch->n_reading--;
    if (is_finished(piece->batch)) {
        (void)pthread_cond_broadcast(&pool->has_result);
    }
}

static void *
run_reader(void *arg)
{
    struct reader *self = arg;
    struct readers *pool = self->pool;
    (void)pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->first == NULL && !pool->is_stopping) {
            (void)pthread_cond_wait(&pool->has_work, &pool->lock);
        }
        if (pool->first == NULL) {
            break;
        }
        struct piece piece = take_piece(pool);
        (void)pthread_mutex_unlock(&pool->lock);
        const struct readers_request *request = piece.request;
        ssize_t n = direct_read_at(
            request->file, (unsigned char *)request->data + piece.start, piece.len,
            request->offset + piece.start, &self->bounce);
        (void)pthread_mutex_lock(&pool->lock);
        finish_piece(pool, &piece, n);
    }
    (void)pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Start the next thread of pool. Returns 0 or -errno. */
static int
start_reader(struct readers *pool)
{
    struct reader *self = &pool->threads[pool->n_threads];
    self->pool = pool;
    self->bounce.size_bytes = READERS_BOUNCE_BYTES;
    int error = posix_memalign(&self->bounce.data, DIRECT_MAX_BLOCK_BYTES,
                               READERS_BOUNCE_BYTES);
    if (error != 0) {
        return -error;
    }
    /* A thread inherits the mask: signals stay with the threads that wait for them. */
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&self->thread, NULL, run_reader, self);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        free(self->bounce.data);
        return -error;
    }
    (void)pthread_setname_np(self->thread, "headrace-reader");
    pool->n_threads++;
    return 0;
}

int
readers_create(struct readers **out, unsigned n_threads)
{
    *out = NULL;
    if (n_threads < 1 || n_threads > READERS_MAX_THREADS) {
        return -EINVAL;
    }
    struct readers *pool = calloc(1, sizeof *pool + n_threads * sizeof *pool->threads);
    if (pool == NULL) {
        return -ENOMEM;
    }
    /* With default attributes these three can't fail on Linux. */
    (void)pthread_mutex_init(&pool->lock, NULL);
    (void)pthread_cond_init(&pool->has_work, NULL);
    (void)pthread_cond_init(&pool->has_result, NULL);
    while (pool->n_threads < n_threads) {
        int error = start_reader(pool);
        if (error != 0) {
            readers_destroy(pool);
            return error;
        }
    }
    *out = pool;
    return 0;
}

void
readers_destroy(struct readers *pool)
{
    if (pool == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&pool->lock);
    pool->is_stopping = true;
    (void)pthread_cond_broadcast(&pool->has_work);
    (void)pthread_mutex_unlock(&pool->lock);
    for (unsigned i = 0; i < pool->n_threads; i++) {
        (void)pthread_join(pool->threads[i].thread, NULL);
        free(pool->threads[i].bounce.data);
    }
    (void)pthread_cond_destroy(&pool->has_result);
    (void)pthread_cond_destroy(&pool->has_work);
    (void)pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void
readers_batch_add(struct readers_batch *batch, struct readers_request *request)
{
    request->next = NULL;
    if (batch->last == NULL) {
        batch->first = request;
    } else {
        batch->last->next = request;
    }
    batch->last = request;
}

/* Make batch ready to be issued. False: it has nothing to read. */
static bool
prepare(struct readers_batch *batch)
{
    for (struct readers_request *r = batch->first; r != NULL; r = r->next) {
        r->result = r->len > SSIZE_MAX ? -EOVERFLOW : (ssize_t)r->len;
    }
    batch->issuing = batch->first;
    batch->issued_bytes = 0;
    batch->n_reading = 0;
    batch->next = NULL;
    skip_issued(batch);
    return batch->issuing != NULL;
}

/* Return about how many threads a batch can keep busy. */
static size_t
count_pieces(const struct readers_batch *batch)
{
    size_t n = 0;
    for (const struct readers_request *r = batch->issuing; r != NULL; r = r->next) {
        n += r->len / READERS_PIECE_BYTES + 1;
    }
    return n;
}

void
readers_submit_all(struct readers *pool, struct readers_batch *const *batches, size_t n,
                   bool is_urgent)
{
    struct readers_batch *first = NULL;
    struct readers_batch *last = NULL;
    size_t n_pieces = 0;
    for (size_t i = 0; i < n; i++) {
        if (prepare(batches[i])) {
            n_pieces += count_pieces(batches[i]);
            if (last == NULL) {
                first = batches[i];
            } else {
                last->next = batches[i];
            }
            last = batches[i];
        }
    }
    if (first == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&pool->lock);
    if (is_urgent) {
        last->next = pool->first;
        pool->first = first;
        pool->last = pool->last == NULL ? last : pool->last;
    } else {
        *(pool->last == NULL ? &pool->first : &pool->last->next) = first;
        pool->last = last;
    }
    /* Not all of them: a thread that finds nothing to read takes its time from others. */
    for (size_t i = 0; i < n_pieces && i < pool->n_threads; i++) {
        (void)pthread_cond_signal(&pool->has_work);
    }
    (void)pthread_mutex_unlock(&pool->lock);
}

void
readers_submit(struct readers *pool, struct readers_batch *batch)
{
    readers_submit_all(pool, &batch, 1, false);
}

bool
readers_cancel(struct readers *pool, struct readers_batch *batch)
{
    (void)pthread_mutex_lock(&pool->lock);
    bool is_untouched = batch->issuing != NULL && batch->issuing == batch->first
                        && batch->issued_bytes == 0 && batch->n_reading == 0;
    if (is_untouched) {
        batch->issuing = NULL;
        trim_queue(pool);
    }
    (void)pthread_mutex_unlock(&pool->lock);
    return is_untouched;
}

bool
readers_is_finished(struct readers *pool, const struct readers_batch *batch)
{
    (void)pthread_mutex_lock(&pool->lock);
    bool finished = is_finished(batch);
    (void)pthread_mutex_unlock(&pool->lock);
    return finished;
}

void
readers_wait(struct readers *pool, const struct readers_batch *batch)
{
    (void)pthread_mutex_lock(&pool->lock);
    while (!is_finished(batch)) {
        (void)pthread_cond_wait(&pool->has_result, &pool->lock);
    }
    (void)pthread_mutex_unlock(&pool->lock);
}

struct readers_stats
readers_get_stats(struct readers *pool)
{
    (void)pthread_mutex_lock(&pool->lock);
    struct readers_stats stats = pool->stats;
    if (pool->n_reading > 0) {
        stats.busy_ns += clock_ns() - pool->busy_since_ns;
    }
    (void)pthread_mutex_unlock(&pool->lock);
    return stats;
}
