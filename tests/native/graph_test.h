/* Graphs of ggml's tensors, and their evaluation as ggml-backend.cpp does it: a callback
 * is asked about nodes until it wants to stop, then they are computed. Results of the
 * operations depend on every byte of the weights. Included once by a program, after
 * model_test.h. */

#define MAX_NODES 40u
#define MAX_TOKENS 12u
#define MAX_RESULT_BYTES ((size_t)1024)

enum { OP_OTHER = 1 };  /* one that the callback does not know */

struct node {
    struct ggml_tensor tensor;
    void (*compute)(struct ggml_tensor *node);  /* NULL: a view, of which nothing is */
};

struct graph {
    struct node nodes[MAX_NODES];
    size_t n_nodes;
    _Alignas(16) unsigned char results[MAX_NODES][MAX_RESULT_BYTES];
    struct ggml_backend_buffer *buffer;
    struct ggml_tensor state;  /* what the routers see */
    float values[MAX_TOKENS * N_INPUTS];
    const struct node *hook_at;  /* before it is computed, hook is called */
    void (*hook)(void);
};

static inline struct graph *
graph_create(void)
{
    struct graph *graph = calloc(1, sizeof *graph);
    CHECK(graph != NULL);
    graph->buffer = cpu_alloc(&cpu_type, 1);
    return graph;
}

static inline void
graph_free(struct graph *graph)
{
    buffer_free(graph->buffer);
    free(graph);
}

/* Append a node that prefix and block name, with room for results of a shape. */
static inline struct ggml_tensor *
add(struct graph *graph, const char *prefix, unsigned block, int op,
    void (*compute)(struct ggml_tensor *), int64_t n0, int64_t n1)
{
    CHECK(graph->n_nodes < MAX_NODES);
    struct node *node = &graph->nodes[graph->n_nodes];
    char name[GGML_MAX_NAME];
    (void)snprintf(name, sizeof name, "%s-%u", prefix, block);
    set_shape(&node->tensor, name, n0, n1, 1);
    CHECK(n_bytes(&node->tensor) <= MAX_RESULT_BYTES);
    node->tensor.op = op;
    node->tensor.flags = GGML_TENSOR_FLAG_COMPUTE;
    node->tensor.buffer = graph->buffer;
    node->tensor.data = graph->results[graph->n_nodes++];
    node->compute = compute;
    return &node->tensor;
}

static inline struct node *
find_node(struct graph *graph, const char *name)
{
    size_t i = 0;
    while (i < graph->n_nodes && strcmp(graph->nodes[i].tensor.name, name) != 0) {
        i++;
    }
    CHECK(i < graph->n_nodes);
    return &graph->nodes[i];
}

static inline bool
is_computed(struct graph *graph, const char *name)
{
    static const unsigned char nothing[MAX_RESULT_BYTES];
    const struct ggml_tensor *node = &find_node(graph, name)->tensor;
    return memcmp(node->data, nothing, MAX_RESULT_BYTES) != 0;
}

/* Compute all nodes; callback may be NULL. Returns false if the pass was aborted. */
static inline bool
compute(struct graph *graph, struct callback *callback)
{
    struct node *first = graph->nodes, *end = graph->nodes + graph->n_nodes;
    while (first < end) {
        struct node *last = callback == NULL ? end - 1 : first;
        bool stops = callback != NULL && callback_eval(&last->tensor, true, callback);
        while (!stops && last + 1 < end) {
            stops = callback_eval(&(++last)->tensor, true, callback);
        }
        for (struct node *node = first; node <= last; node++) {
            if (node->compute == NULL
                || (node->tensor.flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
                continue;
            }
            if (node == graph->hook_at) {
                graph->hook();
            }
            node->compute(&node->tensor);
            if (callback != NULL && callback_abort(callback)) {
                return false;
            }
        }
        if (stops && !callback_eval(&last->tensor, false, callback)) {
            return false;
        }
        first = last + 1;
    }
    return true;
}

static inline uint64_t
hash_bytes(uint64_t hash, const void *data, size_t len)
{
    for (size_t i = 0; i < len; i += sizeof(uint32_t)) {
        uint32_t word;
        memcpy(&word, (const unsigned char *)data + i, sizeof word);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return hash;
}

/* A MUL_MAT: one number that depends on all of the weight and on what it is applied to. */
static inline void
multiply(struct ggml_tensor *node)
{
    const struct ggml_tensor *weight = node->src[0];
    uint64_t hash;
    CHECK(weight->extra == NULL);  /* ggml would take it for its own */
    memcpy(&hash, node->src[1]->data, sizeof hash);
    hash = hash_bytes(hash, weight->data, n_bytes(weight));
    memcpy(node->data, &hash, sizeof hash);
}

/* A MUL_MAT_ID: such a number for each expert that each token has chosen. */
static inline void
multiply_chosen(struct ggml_tensor *node)
{
    const struct ggml_tensor *weight = node->src[0], *ids = node->src[2];
    uint64_t hashes[MAX_RESULT_BYTES / sizeof(uint64_t)];
    size_t n = 0;
    CHECK(weight->extra == NULL);
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        const char *row = (const char *)ids->data + (size_t)token * ids->nb[1];
        for (int64_t i = 0; i < ids->ne[0]; i++) {
            int32_t id;
            memcpy(&id, row + (size_t)i * ids->nb[0], sizeof id);
            CHECK(id >= 0 && id < weight->ne[2]);
            const char *expert = (const char *)weight->data + (size_t)id * weight->nb[2];
            size_t len = weight->nb[1] * (size_t)weight->ne[1];
            memcpy(&hashes[n], node->src[1]->data, sizeof hashes[n]);
            hashes[n] = hash_bytes(hashes[n], expert, len);
            n++;
        }
    }
    memcpy(node->data, hashes, n * sizeof *hashes);
}

/* A MUL_MAT with a router: logits of all experts for each token. */
static inline void
score(struct ggml_tensor *node)
{
    const float *router = node->src[0]->data, *state = node->src[1]->data;
    float *logits = node->data;
    for (int64_t i = 0; i < node->ne[0] * node->ne[1]; i++) {
        const float *weights = router + i % node->ne[0] * N_INPUTS;
        const float *inputs = state + i / node->ne[0] * N_INPUTS;
        logits[i] = 0;
        for (unsigned k = 0; k < N_INPUTS; k++) {
            logits[i] += weights[k] * inputs[k];
        }
    }
}

/* An ARGSORT: all experts of each token, the likeliest first. */
static inline void
sort(struct ggml_tensor *node)
{
    for (int64_t token = 0; token < node->ne[1]; token++) {
        const float *logits = (const float *)node->src[0]->data + token * node->ne[0];
        int32_t *row = (int32_t *)node->data + token * node->ne[0];
        for (int32_t i = 0; i < node->ne[0]; i++) {
            int32_t k = i;
            for (; k > 0 && logits[row[k - 1]] < logits[i]; k--) {
                row[k] = row[k - 1];
            }
            row[k] = i;
        }
    }
}

/* A GET_ROWS by the experts chosen, by their own numbers. */
static inline void
weigh(struct ggml_tensor *node)
{
    const struct ggml_tensor *chosen = node->src[1];
    for (int64_t token = 0; token < chosen->ne[1]; token++) {
        const char *row = (const char *)chosen->data + (size_t)token * chosen->nb[1];
        uint64_t hash = hash_bytes(1, row, (size_t)chosen->ne[0] * chosen->nb[0]);
        memcpy((uint64_t *)node->data + token, &hash, sizeof hash);
    }
}
