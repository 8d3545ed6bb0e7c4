/* Passes of a streamed model: they equal those of the same model in memory, whatever went
 * wrong before. Included once by a program, after graph_test.h. */

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

/* Have the routers see other numbers, the same for the same pass, and forget results. */
static inline void
start_pass(struct graph *graph, unsigned pass)
{
    memset(graph->results, 0, sizeof graph->results);
    for (size_t i = 0; i < MAX_TOKENS * N_INPUTS; i++) {
        unsigned mixed = (unsigned)(i + 1 + pass * 7919) * 2654435761u;
        graph->values[i] = (float)(mixed >> 8 & 0xffff) / 0x8000 - 1;
    }
}

/* Compute both graphs, of a loaded model and of the one in memory: they are equal. */
static inline void
check_pass(struct loaded *loaded, struct graph *graph, struct graph *resident,
           unsigned pass)
{
    start_pass(graph, pass);
    start_pass(resident, pass);
    CHECK(compute(resident, NULL));
    CHECK(compute(graph, stream_callback(loaded->stream)));
    CHECK(stream_finish(loaded->stream).read.error == 0);
    CHECK(memcmp(graph->results, resident->results, sizeof graph->results) == 0);
}

typedef void (*builder)(struct graph *graph, const struct model *model,
                        struct ggml_tensor *tensors, unsigned n_tokens);

/* Run passes, of which each second one is of a graph that the one before was of too. */
static inline void
check_passes(struct loaded *loaded, builder build, unsigned n_tokens, unsigned first,
             unsigned n)
{
    struct ggml_tensor tensors[MAX_BLOCKS * N_KINDS], before[MAX_BLOCKS * N_KINDS];
    make_resident(loaded->model, tensors);
    memcpy(before, loaded->tensors, sizeof before);
    struct graph *resident = graph_create();
    build(resident, loaded->model, tensors, n_tokens);
    struct graph *graph = NULL;
    for (unsigned i = first; i < first + n; i++) {
        if (graph == NULL) {
            graph = graph_create();
            build(graph, loaded->model, loaded->tensors, n_tokens);
        }
        check_pass(loaded, graph, resident, i);
        if (i % 2 == 1) {
            graph_free(graph);
            graph = NULL;
        }
    }
    if (graph != NULL) {
        graph_free(graph);
    }
    graph_free(resident);
    CHECK(memcmp(before, loaded->tensors, sizeof before) == 0);
}

/* A loaded model in a thread of its own. */
struct runner {
    struct loaded loaded;
    builder build;
    pthread_t thread;
    atomic_bool is_finished;
};

static inline void *
run_passes(void *of)
{
    struct runner *runner = of;
    for (unsigned n_tokens = 1; n_tokens <= 2; n_tokens++) {
        check_passes(&runner->loaded, runner->build, n_tokens, n_tokens, 8);
    }
    atomic_store(&runner->is_finished, true);
    return NULL;
}

/* Run two streams of one model in two threads, and watch both from a third. */
static inline void
check_two_at_once(const struct model *model, builder build, struct stream_config config)
{
    struct runner runners[2];
    for (unsigned i = 0; i < 2; i++) {
        struct runner *runner = &runners[i];
        load(&runner->loaded, model, config);
        runner->build = build;
        atomic_init(&runner->is_finished, false);
        CHECK(pthread_create(&runner->thread, NULL, run_passes, runner) == 0);
    }
    uint64_t n_read = 0;
    for (unsigned i = 0; i < 2; i++) {
        while (!atomic_load(&runners[i].is_finished)) {
            uint64_t n_now = stream_get_stats(runners[0].loaded.stream).reads.bytes_read;
            CHECK(n_now >= n_read);
            n_read = n_now;
            (void)stream_get_stats(runners[1].loaded.stream);
            (void)usleep(1000);
        }
        CHECK(pthread_join(runners[i].thread, NULL) == 0);
    }
    for (unsigned i = 0; i < 2; i++) {
        unload(&runners[i].loaded);
    }
}

static unsigned cut;  /* file that is cut off */
static off_t cut_at;

static inline void
cut_file(void)
{
    CHECK(truncate(files[cut].path, cut_at) == 0);
}

/* Give a file that was cut off its bytes and its times back. */
static inline void
restore_file(const struct stat *before)
{
    int fd = open(files[cut].path, O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, files[cut].content, FILE_BYTES, 0) == (ssize_t)FILE_BYTES);
    const struct timespec times[] = {before->st_atim, before->st_mtim};
    CHECK(futimens(fd, times) == 0 && close(fd) == 0);
}

/* Have a pass in which the file of a weight ends within it from hook_at on, so that node
 * is the first not to be computed; then one with all of the file again. */
static inline void
check_pass_with_file_cut(struct loaded *loaded, builder build, const char *hook_at,
                         const char *node, unsigned index)
{
    const struct weight *weight = &loaded->model->weights[index];
    struct graph *graph = graph_create();
    build(graph, loaded->model, loaded->tensors, 1);
    graph->hook_at = find_node(graph, hook_at);
    graph->hook = cut_file;
    cut = weight->file;
    cut_at = (off_t)weight->offset + 100;
    struct stat before;
    CHECK(stat(files[cut].path, &before) == 0);
    start_pass(graph, 0);
    (void)compute(graph, stream_callback(loaded->stream));
    struct callback_fault fault = stream_finish(loaded->stream);
    CHECK(fault.read.error == -ESTALE || fault.read.error == -ENODATA);
    CHECK(fault.read.file == cut && fault.read.len > 0);
    CHECK(strcmp(fault.node, node) == 0);
    CHECK(strcmp(fault.weight, weight->shape.name) == 0);
    CHECK(is_computed(graph, hook_at) && !is_computed(graph, node));
    for (size_t i = 0; i < graph->n_nodes; i++) {
        CHECK((graph->nodes[i].tensor.flags & GGML_TENSOR_FLAG_COMPUTE) != 0);
    }
    restore_file(&before);
    graph_free(graph);
    check_passes(loaded, build, 1, 0, 2);
}

/* Have passes that end after each of their nodes, and whole ones behind them. */
static inline void
check_passes_given_up(struct loaded *loaded, builder build)
{
    struct graph *graph = graph_create();
    build(graph, loaded->model, loaded->tensors, 1);
    size_t n_nodes = graph->n_nodes;
    for (graph->n_nodes = 1; graph->n_nodes < n_nodes; graph->n_nodes += 3) {
        start_pass(graph, 100);
        CHECK(compute(graph, stream_callback(loaded->stream)));
        CHECK(stream_finish(loaded->stream).read.error == 0);
        check_passes(loaded, build, 1, (unsigned)graph->n_nodes, 1);
    }
    graph_free(graph);
}

/* Have a pass of an operation on src0 and src1 that nobody foresaw, before all others;
 * weight is the name of the one that it is about. */
static inline void
check_strange(struct loaded *loaded, builder build, int op, struct ggml_tensor *src0,
              struct ggml_tensor *src1, const char *weight)
{
    struct graph *graph = graph_create();
    struct ggml_tensor *odd = add(graph, "odd", 0, op, multiply, 2, 1);
    odd->src[0] = src0;
    odd->src[1] = src1;
    build(graph, loaded->model, loaded->tensors, 1);
    CHECK(!compute(graph, stream_callback(loaded->stream)));
    struct callback_fault fault = stream_finish(loaded->stream);
    CHECK(fault.read.error == -ENOTSUP && fault.read.len == 0);
    CHECK(strcmp(fault.node, "odd-0") == 0 && strcmp(fault.weight, weight) == 0);
    CHECK(!is_computed(graph, "odd-0") && !is_computed(graph, "gate-0"));
    graph_free(graph);
    check_passes(loaded, build, 1, 0, 1);
}
