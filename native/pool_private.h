/* What pool.c and pool_guess.c share. */

#ifndef HEADRACE_POOL_PRIVATE_H
#define HEADRACE_POOL_PRIVATE_H

#include "pool.h"

enum state { ABSENT, READING, READY };

#define NO_RECORD (-1)

struct record {
    enum state state;
    bool is_taken;
    bool is_guess;      /* and was not taken yet */
    uint64_t used_at;   /* number of the take that used it last */
    uint32_t key;  /* layer and expert, if not ABSENT */
    struct span spans[POOL_MAX_PARTS];
    struct readers_batch batches[POOL_MAX_PARTS];
};

struct pool {
    struct source *source;
    struct policy *policy;
    struct pages pages;
    size_t stride;
    size_t part_offset[POOL_MAX_PARTS];
    unsigned n_parts;
    unsigned n_layers;
    struct pool_layer *layers;
    uint32_t *first_key;       /* of each layer */
    size_t n_keys;             /* experts of all layers */
    int32_t *record_of;        /* by key; NO_RECORD: absent */
    uint32_t *uses;            /* by key: steps that used the expert */
    size_t n_records;          /* that there are addresses for */
    size_t n_usable;           /* that there is memory for: the first ones */
    struct record *records;
    int32_t *absent;           /* records that are */
    size_t n_absent;
    int32_t *taken;            /* records taken */
    size_t n_taken;
    uint64_t n_takes;
    int32_t *guesses;          /* records that are guessed, and perhaps being read */
    size_t n_guesses;
    int32_t *late;             /* of them, those taken before they were read */
    struct readers_batch **issued;
    struct pool_stats stats;
};

/* Make record i absent. */
void pool_drop(struct pool *pool, int32_t i);

/* Wait for all parts of record i if it is being read; it is then ready, or absent. */
int pool_settle(struct pool *pool, int32_t i, struct fault *fault);

/* Return whether record i may be evicted: a policy_filter. */
bool pool_may_go(void *pool, int32_t i);

/* Give the expert a record and set up its reads. Returns the record or -1: none left. */
int32_t pool_admit(struct pool *pool, unsigned layer, uint32_t expert,
                   policy_filter filter);

/* Submit the batches of records, part by part, as the kernels use them. */
void pool_issue(struct pool *pool, const int32_t *records, size_t n_records,
                bool is_urgent);

/* Submit before all others what is not begun of records that turned out to be needed. */
void pool_promote(struct pool *pool, const int32_t *records, size_t n_records);

/* Go through the guesses now that a layer's experts are taken: those that are read are
 * records like others, those that are not begun are given up. */
void pool_sort_out_guesses(struct pool *pool);

/* Wait for all guesses: wrong ones are then records that may go. */
void pool_settle_guesses(struct pool *pool);

#endif
