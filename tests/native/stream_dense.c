/* stream.h and callback.h with a small dense model: every node sees the bytes of the file,
 * in any order of what can go wrong.
 *
 * Exit status: 0 passed, 1 failed. Runs under ASan and UBSan, and under TSan.
 */

#define _GNU_SOURCE  /* RTLD_NEXT */

#include "core_test.h"
#include "ggml_test.h"
#include "model_test.h"
#include "graph_test.h"
#include "stream_test.h"

#include <dirent.h>
#include <sys/resource.h>

static struct model model = {.n_blocks = 3, .n_in_pool = 2};
static const struct stream_config common = {.n_threads = 3, .n_ring_slots = 3};

static struct ggml_tensor *
add_product(struct graph *graph, const char *prefix, unsigned block,
            struct ggml_tensor *weight, struct ggml_tensor *x)
{
    struct ggml_tensor *node = add(graph, prefix, block, GGML_OP_MUL_MAT, multiply, 2, 1);
    node->src[0] = weight;
    node->src[1] = x;
    return node;
}

static void
build(struct graph *graph, const struct model *of, struct ggml_tensor *tensors,
      unsigned n_tokens)
{
    set_shape(&graph->state, "state", N_INPUTS, n_tokens, 1);
    graph->state.data = graph->values;
    struct ggml_tensor *x = &graph->state;
    for (unsigned block = 0; block < of->n_blocks; block++) {
        struct ggml_tensor *w = tensors + (size_t)block * N_KINDS;
        struct ggml_tensor *mix = add_product(graph, "mix", block, &w[TRUNK], x);
        struct ggml_tensor *gate = add_product(graph, "gate", block, &w[GATE], mix);
        struct ggml_tensor *up = add_product(graph, "up", block, &w[UP], gate);
        struct ggml_tensor *view = add(graph, "view", block, GGML_OP_VIEW, NULL, 2, 1);
        view->src[0] = view->view_src = up;
        view->data = up->data;
        x = add_product(graph, "down", block, &w[DOWN], view);
    }
}

static void
test_every_node_sees_the_bytes_of_the_file(struct stream_config config)
{
    struct loaded loaded;
    load(&loaded, &model, config);
    CHECK(stream_file(loaded.stream) == NULL);
    /* Of what is streamed nothing was read at load. */
    uint64_t n_at_load = stream_get_stats(loaded.stream).reads.bytes_read;
    CHECK(n_at_load >= model.n_trunk_bytes);
    CHECK(n_at_load < model.n_trunk_bytes + n_bytes(&model.weights[GATE].shape));
    check_passes(&loaded, build, 1, 0, 5);
    struct stream_stats stats = stream_get_stats(loaded.stream);
    CHECK(stats.n_demand == 1);  /* the very first: all others were read ahead */
    CHECK(stats.n_ahead == 5 * model.n_blocks * 3 - 1);
    size_t slot_bytes = n_bytes(&model.weights[DOWN].shape);
    CHECK(stats.resident_bytes >= config.n_ring_slots * slot_bytes);
    CHECK(config.is_buffered == !stream_is_direct(loaded.stream));
    for (unsigned i = 0; i < model.n_blocks * N_KINDS; i++) {
        CHECK(is_there(loaded.tensors[i].data) == (i % N_KINDS == TRUNK));
    }
    unload(&loaded);
}

static void
test_a_file_cut_off_in_mid_pass_ends_the_pass(void)
{
    struct loaded loaded;
    load(&loaded, &model, common);
    check_pass_with_file_cut(&loaded, build, "mix-1", "up-1", N_KINDS + UP);
    check_pass_with_file_cut(&loaded, build, "up-2", "down-2", 2 * N_KINDS + DOWN);
    unload(&loaded);
}

static void
test_operations_that_are_not_foreseen_end_the_pass(void)
{
    struct loaded loaded;
    load(&loaded, &model, common);
    struct ggml_tensor *trunk = &loaded.tensors[TRUNK], *gate = &loaded.tensors[GATE];
    check_strange(&loaded, build, OP_OTHER, gate, trunk, gate->name);
    check_strange(&loaded, build, GGML_OP_MUL_MAT_ID, gate, trunk, gate->name);
    check_strange(&loaded, build, GGML_OP_MUL_MAT, trunk, gate, gate->name);
    struct ggml_tensor view = *gate;
    view.view_src = gate;
    view.extra = NULL;
    check_strange(&loaded, build, GGML_OP_MUL_MAT, &view, trunk, "");
    unload(&loaded);
}

static void
test_a_pass_given_up_by_others_leaves_the_next_one_right(void)
{
    struct loaded loaded;
    load(&loaded, &model, common);
    check_passes_given_up(&loaded, build);
    unload(&loaded);
}

static const char *
other_version(void)
{
    return "0.25.4";
}

static void
test_what_can_not_be_streamed_is_refused(void)
{
    struct loaded loaded;
    unsigned failed;
    struct stream_config config = common;
    const char *paths[] = {files[0].path, "/nowhere/to/be/found"};
    config.paths = paths;
    CHECK(open_model(&loaded, &model, config, &failed) == -ENOENT && failed == 1);
    config = common;
    struct ggml_functions other = ggml;
    other.version = other_version;
    config.ggml = &other;
    CHECK(open_model(&loaded, &model, config, &failed) == -ENOTSUP && failed == 2);
    config = common;
    config.n_threads = 0;
    CHECK(open_model(&loaded, &model, config, &failed) == -EINVAL && failed == 2);
    /* A weight that llama.cpp did not place where it was told to. */
    CHECK(open_model(&loaded, &model, common, &failed) == 0);
    CHECK(stream_start(loaded.stream) == -EINVAL);
    unload(&loaded);
    config = common;
    config.n_ring_slots = 1;
    CHECK(open_model(&loaded, &model, config, &failed) == 0);
    read_model(&loaded);
    CHECK(stream_start(loaded.stream) == -EINVAL);
    unload(&loaded);
    stream_close(NULL);
}

static unsigned
count_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    unsigned n = 0;
    while (readdir(folder) != NULL) {
        n++;
    }
    CHECK(closedir(folder) == 0);
    return n;
}

static void
test_descriptors_that_run_out_leave_none_behind(void)
{
    struct rlimit before;
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    int next = dup(0);
    CHECK(next >= 0 && close(next) == 0);
    unsigned n_open = count_descriptors();
    /* One for each file, and one for the memory that is written to at load. */
    for (unsigned n = 0; n <= 3; n++) {
        struct rlimit limit = {(rlim_t)next + n, before.rlim_max};
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
        struct loaded loaded;
        unsigned failed;
        int error = open_model(&loaded, &model, common, &failed);
        CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
        CHECK(n == 3 ? error == 0 : error == -EMFILE && failed == n);
        unload(&loaded);
        CHECK(count_descriptors() == n_open);
    }
}

int
main(void)
{
    make_model(&model);
    for (unsigned i = 0; i < 8; i++) {
        struct stream_config config = common;
        config.is_buffered = i % 2 == 1;
        config.n_ring_slots = RING_MIN_SLOTS + i / 2 % 2 * 4;
        config.n_threads = i / 4 == 0 ? 1 : 4;
        test_every_node_sees_the_bytes_of_the_file(config);
    }
    test_a_file_cut_off_in_mid_pass_ends_the_pass();
    test_operations_that_are_not_foreseen_end_the_pass();
    test_a_pass_given_up_by_others_leaves_the_next_one_right();
    check_two_at_once(&model, build, common);
    test_what_can_not_be_streamed_is_refused();
    test_descriptors_that_run_out_leave_none_behind();
    return 0;
}
