/* stream.h and callback.h with a small mixture of experts: every token sees the bytes of
 * the experts that it chose, in any order of what can go wrong.
 *
 * Exit status: 0 passed, 1 failed. Runs under ASan and UBSan, and under TSan.
 */

#define _GNU_SOURCE  /* RTLD_NEXT */

#include "core_test.h"
#include "ggml_test.h"
#include "model_test.h"
#include "graph_test.h"
#include "stream_test.h"

#define N_EXPERTS 12u
#define N_USED 3u

static struct model model = {
    .n_blocks = 4, .n_experts = N_EXPERTS, .n_used = N_USED, .n_in_pool = 3};
static const size_t all_records[] = {(size_t)3 * N_EXPERTS, N_EXPERTS};
static const size_t few_records[] = {15, 9};
static const struct stream_config common = {
    .n_threads = 3, .pool_records = few_records, .n_pools = 2};

/* Add a MUL_MAT_ID as llama.cpp names and makes them. */
static struct ggml_tensor *
add_experts(struct graph *graph, const char *prefix, unsigned block,
            struct ggml_tensor *weight, struct ggml_tensor *x, struct ggml_tensor *chosen)
{
    struct ggml_tensor *node =
        add(graph, prefix, block, GGML_OP_MUL_MAT_ID, multiply_chosen,
            (int64_t)(N_USED * sizeof(uint64_t) / sizeof(float)), chosen->ne[1]);
    node->src[0] = weight;
    node->src[1] = x;
    node->src[2] = chosen;
    return node;
}

static void
build(struct graph *graph, const struct model *of, struct ggml_tensor *tensors,
      unsigned n_tokens)
{
    set_shape(&graph->state, "state", N_INPUTS, n_tokens, 1);
    graph->state.data = graph->values;
    graph->state.buffer = graph->buffer;
    struct ggml_tensor *x = &graph->state;
    for (unsigned block = 0; block < of->n_blocks; block++) {
        struct ggml_tensor *w = tensors + (size_t)block * N_KINDS;
        struct ggml_tensor *logits = add(graph, "ffn_moe_logits", block, GGML_OP_MUL_MAT,
                                         score, N_EXPERTS, n_tokens);
        logits->src[0] = &w[TRUNK];
        logits->src[1] = &graph->state;
        struct ggml_tensor *sorted =
            add(graph, "sorted", block, OP_OTHER, sort, N_EXPERTS, n_tokens);
        sorted->src[0] = logits;
        struct ggml_tensor *chosen =
            add(graph, "ffn_moe_topk", block, GGML_OP_VIEW, NULL, N_USED, n_tokens);
        chosen->type = sorted->type = GGML_TYPE_I32;
        chosen->src[0] = chosen->view_src = sorted;
        chosen->data = sorted->data;
        chosen->nb[1] = sorted->nb[1];
        chosen->nb[2] = chosen->nb[3] = sorted->nb[2];
        struct ggml_tensor *weights =
            add(graph, "weights", block, OP_OTHER, weigh, 2, n_tokens);
        weights->src[0] = logits;
        weights->src[1] = chosen;
        struct ggml_tensor *gate = add_experts(graph, "gate", block, &w[GATE], x, chosen);
        struct ggml_tensor *up = add_experts(graph, "up", block, &w[UP], gate, chosen);
        x = add_experts(graph, "down", block, &w[DOWN], up, chosen);
    }
}

static void
test_every_token_sees_the_experts_that_it_chose(struct stream_config config)
{
    struct loaded loaded;
    load(&loaded, &model, config);
    uint64_t n_at_load = stream_get_stats(loaded.stream).reads.bytes_read;
    CHECK(n_at_load < model.n_trunk_bytes + n_bytes(&model.weights[GATE].shape));
    const unsigned n_tokens[] = {1, 3, 2, 1};
    for (unsigned i = 0; i < 4; i++) {
        check_passes(&loaded, build, n_tokens[i], 10 * i, 3);
    }
    struct stream_stats stats = stream_get_stats(loaded.stream);
    CHECK(stats.n_misses > 0);
    CHECK((stats.n_evictions > 0) == (config.pool_records == few_records));
    CHECK(stats.n_hits > 0 || config.policy == POLICY_MRU);
    for (unsigned i = 0; i < model.n_blocks * N_KINDS; i++) {
        CHECK(is_there(loaded.tensors[i].data) == (i % N_KINDS == TRUNK));
    }
    unload(&loaded);
}

static void
test_experts_read_ahead_are_those_chosen(enum lookahead_mode mode)
{
    struct loaded loaded;
    struct stream_config config = common;
    config.pool_records = all_records;
    config.lookahead = mode;
    load(&loaded, &model, config);
    for (unsigned i = 0; i < 10; i++) {
        check_passes(&loaded, build, 1 + i % 2, 2 * i, 2);
    }
    /* All routers see the same state here: what is guessed is chosen, if it was absent. */
    struct stream_stats stats = stream_get_stats(loaded.stream);
    CHECK((stats.n_useful > 0) == (mode != LOOKAHEAD_OFF));
    CHECK(stats.n_guesses == stats.n_useful && stats.n_late <= stats.n_useful);
    unload(&loaded);
}

static void
test_many_tokens_have_all_experts_of_the_next_block_read_ahead(void)
{
    struct loaded loaded;
    struct stream_config config = common;
    config.pool_records = all_records;
    load(&loaded, &model, config);
    check_passes(&loaded, build, MAX_TOKENS, 0, 3);
    CHECK(stream_get_stats(loaded.stream).n_useful > 0);
    unload(&loaded);
}

static void
test_what_was_used_is_counted_and_can_be_there_before_it_is_used_again(void)
{
    struct loaded loaded;
    struct stream_config config = common;
    config.pool_records = all_records;
    load(&loaded, &model, config);
    uint32_t uses[MAX_BLOCKS * N_EXPERTS], used[MAX_BLOCKS * N_EXPERTS];
    CHECK(stream_n_experts(loaded.stream) == MAX_BLOCKS * N_EXPERTS);
    check_passes(&loaded, build, 1, 0, 2);
    stream_get_uses(loaded.stream, uses);
    unload(&loaded);
    size_t n_used = 0, n_uses = 0;
    for (uint32_t i = 0; i < MAX_BLOCKS * N_EXPERTS; i++) {
        n_uses += uses[i];
        if (uses[i] > 0) {
            used[n_used++] = i;
        }
    }
    CHECK(n_uses == (size_t)2 * MAX_BLOCKS * N_USED);
    load(&loaded, &model, config);
    CHECK(stream_fill(loaded.stream, used, n_used) == n_used);
    check_passes(&loaded, build, 1, 0, 2);
    CHECK(stream_get_stats(loaded.stream).n_misses == 0);
    unload(&loaded);
}

static void
test_more_experts_than_records_end_the_pass(void)
{
    struct loaded loaded;
    load(&loaded, &model, common);
    struct graph *graph = graph_create();
    build(graph, &model, loaded.tensors, MAX_TOKENS);
    start_pass(graph, 0);
    CHECK(!compute(graph, stream_callback(loaded.stream)));
    struct callback_fault fault = stream_finish(loaded.stream);
    CHECK(fault.read.error == -ENOSPC && fault.read.len == 0);
    CHECK(strcmp(fault.node, "ffn_moe_topk-3") == 0 && fault.weight[0] == '\0');
    CHECK(is_computed(graph, "down-2") && !is_computed(graph, "gate-3"));
    graph_free(graph);
    check_passes(&loaded, build, 3, 0, 2);
    unload(&loaded);
}

static void
test_a_file_cut_off_in_mid_pass_ends_the_pass(unsigned block)
{
    struct loaded loaded;
    load(&loaded, &model, common);
    char hook_at[GGML_MAX_NAME], node[GGML_MAX_NAME];
    (void)snprintf(hook_at, sizeof hook_at, "ffn_moe_logits-%u", block);
    (void)snprintf(node, sizeof node, "gate-%u", block);
    check_pass_with_file_cut(&loaded, build, hook_at, node, block * N_KINDS + GATE);
    unload(&loaded);
}

/* Fail the read of the first expert's slice of a weight that is chosen in pass 0. */
static void
test_a_failed_read_ends_the_pass_before_the_part_that_needs_it(unsigned kind)
{
    static const char *const nodes[] = {NULL, "gate-1", "up-1", "down-1"};
    struct loaded loaded;
    load(&loaded, &model, common);
    struct graph *graph = graph_create(), *resident = graph_create();
    struct ggml_tensor tensors[MAX_BLOCKS * N_KINDS];
    make_resident(&model, tensors);
    build(resident, &model, tensors, 1);
    build(graph, &model, loaded.tensors, 1);
    start_pass(resident, 0);
    start_pass(graph, 0);
    CHECK(compute(resident, NULL));
    int32_t expert = *(int32_t *)find_node(resident, "ffn_moe_topk-1")->tensor.data;
    const struct weight *weight = &model.weights[N_KINDS + kind];
    size_t slice_bytes = weight->shape.nb[2];
    bad = (off_t)(weight->offset + (size_t)expert * slice_bytes + slice_bytes / 2);
    CHECK(!compute(graph, stream_callback(loaded.stream)));
    struct callback_fault fault = stream_finish(loaded.stream);
    bad = 0;
    CHECK(fault.read.error == -EIO && fault.read.file == 1);
    CHECK(fault.read.len == slice_bytes);
    CHECK((fault.read.offset - weight->offset) % slice_bytes == 0);
    CHECK(strcmp(fault.node, nodes[kind]) == 0);
    CHECK(strcmp(fault.weight, weight->shape.name) == 0);
    CHECK(is_computed(graph, "down-0"));
    for (unsigned i = kind; i < N_KINDS; i++) {
        CHECK(!is_computed(graph, nodes[i]));
    }
    graph_free(resident);
    graph_free(graph);
    check_passes(&loaded, build, 1, 0, 2);
    unload(&loaded);
}

/* Choose an expert that there isn't. */
static void
choose_nobody(struct ggml_tensor *node)
{
    sort(node);
    *(int32_t *)node->data = N_EXPERTS;
}

/* Have a pass of a graph of one token that change has changed; node is at fault. */
static void
check_changed(struct loaded *loaded, void (*change)(struct graph *graph), int error,
              const char *node)
{
    struct graph *graph = graph_create();
    build(graph, &model, loaded->tensors, 1);
    change(graph);
    start_pass(graph, 0);
    CHECK(!compute(graph, stream_callback(loaded->stream)));
    struct callback_fault fault = stream_finish(loaded->stream);
    CHECK(fault.read.error == error && fault.read.len == 0);
    CHECK(strcmp(fault.node, node) == 0);
    CHECK(is_computed(graph, "down-0") && !is_computed(graph, "down-1"));
    graph_free(graph);
    check_passes(loaded, build, 1, 0, 1);
}

static void
use_other_ids(struct graph *graph)
{
    find_node(graph, "up-1")->tensor.src[2] = &find_node(graph, "sorted-1")->tensor;
}

static void
use_ids_of_block_before(struct graph *graph)
{
    find_node(graph, "up-1")->tensor.src[2] = find_node(graph, "up-0")->tensor.src[2];
}

static void
use_weight_of_block_behind(struct graph *graph)
{
    find_node(graph, "up-1")->tensor.src[0] = find_node(graph, "up-2")->tensor.src[0];
}

static void
use_experts_of_block_before(struct graph *graph)
{
    find_node(graph, "up-1")->tensor.src[0] = find_node(graph, "up-0")->tensor.src[0];
    use_ids_of_block_before(graph);
}

static void
use_other_operation(struct graph *graph)
{
    find_node(graph, "up-1")->tensor.op = OP_OTHER;
}

static void
choose_by_floats(struct graph *graph)
{
    find_node(graph, "ffn_moe_topk-1")->tensor.type = GGML_TYPE_F32;
}

static void
choose_for_many(struct graph *graph)
{
    find_node(graph, "ffn_moe_topk-1")->tensor.ne[2] = 2;
}

static void
choose_what_is_not_there(struct graph *graph)
{
    find_node(graph, "sorted-1")->compute = choose_nobody;
}

static void
test_graphs_that_are_not_foreseen_end_the_pass(void)
{
    struct loaded loaded;
    load(&loaded, &model, common);
    struct ggml_tensor *router = &loaded.tensors[TRUNK], *gate = &loaded.tensors[GATE];
    check_strange(&loaded, build, GGML_OP_MUL_MAT, gate, router, gate->name);
    check_strange(&loaded, build, GGML_OP_MUL_MAT_ID, gate, router, gate->name);
    check_strange(&loaded, build, OP_OTHER, gate, router, gate->name);
    check_changed(&loaded, use_other_ids, -ENOTSUP, "up-1");
    check_changed(&loaded, use_ids_of_block_before, -ENOTSUP, "up-1");
    check_changed(&loaded, use_weight_of_block_behind, -ENOTSUP, "up-1");
    check_changed(&loaded, use_experts_of_block_before, -ENOTSUP, "up-1");
    check_changed(&loaded, use_other_operation, -ENOTSUP, "up-1");
    check_changed(&loaded, choose_by_floats, -ENOTSUP, "ffn_moe_topk-1");
    check_changed(&loaded, choose_for_many, -ENOTSUP, "ffn_moe_topk-1");
    check_changed(&loaded, choose_what_is_not_there, -EINVAL, "ffn_moe_topk-1");
    unload(&loaded);
}

static void
test_passes_given_up_by_others_leave_the_next_one_right(void)
{
    struct loaded loaded;
    load(&loaded, &model, common);
    check_passes_given_up(&loaded, build);
    unload(&loaded);
}

int
main(void)
{
    make_model(&model);
    for (unsigned i = 0; i < 6; i++) {
        struct stream_config config = common;
        config.is_buffered = i % 2 == 1;
        config.policy = (enum policy_kind)(i / 2);
        config.pool_records = i < 4 ? few_records : all_records;
        test_every_token_sees_the_experts_that_it_chose(config);
    }
    test_experts_read_ahead_are_those_chosen(LOOKAHEAD_OFF);
    test_experts_read_ahead_are_those_chosen(LOOKAHEAD_MEASURED);
    test_experts_read_ahead_are_those_chosen(LOOKAHEAD_ON);
    test_many_tokens_have_all_experts_of_the_next_block_read_ahead();
    test_what_was_used_is_counted_and_can_be_there_before_it_is_used_again();
    test_more_experts_than_records_end_the_pass();
    test_a_file_cut_off_in_mid_pass_ends_the_pass(1);
    test_a_file_cut_off_in_mid_pass_ends_the_pass(3);
    for (unsigned kind = GATE; kind < N_KINDS; kind++) {
        test_a_failed_read_ends_the_pass_before_the_part_that_needs_it(kind);
    }
    test_graphs_that_are_not_foreseen_end_the_pass();
    test_passes_given_up_by_others_leave_the_next_one_right();
    struct stream_config config = common;
    config.lookahead = LOOKAHEAD_ON;
    check_two_at_once(&model, build, config);
    return 0;
}
