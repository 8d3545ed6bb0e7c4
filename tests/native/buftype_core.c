/* buftype.h as llama.cpp's loader uses it: what is placed is told, can be written to and
 * takes no memory; another ggml is refused.
 *
 * Exit status: 0 passed, 1 failed. Runs under ASan and UBSan, and under TSan.
 */

#define _GNU_SOURCE  /* RTLD_NEXT */

#include "buftype.h"
#include "core_test.h"
#include "ggml_test.h"

#define N_TENSORS 3u

/* The owner of a buffer type: takes tensors of known names and keeps their addresses. */
struct owner {
    struct buftype buftype;
    unsigned char *addresses[N_TENSORS];
    unsigned n;
};

static bool
take(void *of, struct ggml_tensor *tensor)
{
    struct owner *owner = of;
    if (strcmp(tensor->name, "strange") == 0) {
        return false;
    }
    CHECK(owner->n < N_TENSORS);
    owner->addresses[owner->n++] = tensor->data;
    tensor->data = owner->buftype.sink.data;
    return true;
}

static struct owner *
create(size_t max_bytes)
{
    struct owner *owner = calloc(1, sizeof *owner);
    CHECK(owner != NULL);
    CHECK(buftype_init(&owner->buftype, &ggml, max_bytes, take, owner) == 0);
    return owner;
}

static void
destroy(struct owner *owner)
{
    void *sink = owner->buftype.sink.data;
    buftype_deinit(&owner->buftype);
    CHECK(!is_mapped(sink));
    free(owner);
}

static const char *
other_version(void)
{
    return "0.25.4";
}

static const char *
other_name(struct ggml_backend_buffer_type *type)
{
    (void)type;
    return "Vulkan0";
}

static bool
is_never_host(struct ggml_backend_buffer_type *type)
{
    (void)type;
    return false;
}

static struct ggml_backend_buffer_type strange_type;

static struct ggml_backend_buffer_type *
strange_buffer_type(void)
{
    return &strange_type;
}

static void
test_only_the_ggml_that_is_known_passes(void)
{
    CHECK(buftype_check(&ggml) == 0);
    struct ggml_functions other = ggml;
    other.version = other_version;
    CHECK(buftype_check(&other) == -ENOTSUP);
    other = ggml;
    other.buffer_type_name = other_name;  /* not what the layout says is its name */
    CHECK(buftype_check(&other) == -ENOTSUP);
    other = ggml;
    other.cpu_buffer_type = strange_buffer_type;
    strange_type = cpu_type;
    strange_type.iface.get_name = other_name;
    CHECK(buftype_check(&other) == -ENOTSUP);
    strange_type = cpu_type;
    strange_type.iface.is_host = is_never_host;
    CHECK(buftype_check(&other) == -ENOTSUP);
    strange_type.iface.is_host = NULL;
    CHECK(buftype_check(&other) == -ENOTSUP);
}

static void
test_what_is_placed_has_addresses_of_its_own_without_memory(void)
{
    struct owner *owner = create(1000000);
    struct ggml_backend_buffer_type *type = &owner->buftype.type;
    CHECK(strcmp(type->iface.get_name(type), "CPU") != 0 && type->iface.is_host(type));
    struct ggml_tensor tensors[N_TENSORS], *all[N_TENSORS];
    for (unsigned i = 0; i < N_TENSORS; i++) {
        set_shape(&tensors[i], "weight", 333, 7 + i, 100);
        all[i] = &tensors[i];
    }
    struct ggml_backend_buffer *buffer = place(type, all, N_TENSORS);
    CHECK(buffer != NULL && owner->n == N_TENSORS);
    for (unsigned i = 0; i < N_TENSORS; i++) {
        unsigned char *at = owner->addresses[i];
        CHECK(buftype_holds(&owner->buftype, &tensors[i]));
        CHECK((uintptr_t)at % type->iface.get_alignment(type) == 0);
        CHECK(!is_there(at) && !is_there(at + n_bytes(&tensors[i]) - 1));
        CHECK(i == 0 || at >= owner->addresses[i - 1] + n_bytes(&tensors[i - 1]));
    }
    struct ggml_tensor outside = {0};
    CHECK(!buftype_holds(&owner->buftype, &outside));
    buffer_free(buffer);
    CHECK(!is_mapped(owner->addresses[0]));
    destroy(owner);
}

static void
test_the_loader_may_write_to_all_of_the_largest_tensor(void)
{
    struct owner *owner = create(5 * PAGES_HUGE_BYTES / 2 - 17);
    struct ggml_tensor tensor, *all[] = {&tensor};
    set_shape(&tensor, "weight", 1024, 1279, 1);
    CHECK(n_bytes(&tensor) <= 5 * PAGES_HUGE_BYTES / 2 - 17);
    struct ggml_backend_buffer *buffer = place(&owner->buftype.type, all, 1);
    CHECK(buffer != NULL);
    const struct ggml_backend_buffer_i *call = &buffer->iface;
    size_t last = n_bytes(&tensor) - 8;
    unsigned char bytes[8];
    call->memset_tensor(buffer, &tensor, 7, 0, n_bytes(&tensor));
    call->set_tensor(buffer, &tensor, "01234567", last, 8);
    call->get_tensor(buffer, &tensor, bytes, last, 8);
    CHECK(memcmp(bytes, "01234567", 8) == 0);
    /* The same memory over and over: what is written is never read. */
    call->get_tensor(buffer, &tensor, bytes, last - PAGES_HUGE_BYTES, 8);
    CHECK(memcmp(bytes, "01234567", 8) == 0);
    call->clear(buffer, 0);  /* of addresses without memory */
    buffer_free(buffer);
    destroy(owner);
}

static void
test_views_are_not_told_and_strange_tensors_are_refused(void)
{
    struct owner *owner = create(1);
    struct ggml_tensor weight, view, strange;
    struct ggml_tensor *both[] = {&weight, &view}, *other[] = {&strange};
    set_shape(&weight, "weight", 1, 1, 1);
    view = weight;
    view.view_src = &weight;
    struct ggml_backend_buffer *buffer = place(&owner->buftype.type, both, 2);
    CHECK(buffer != NULL && owner->n == 1);
    CHECK(buftype_holds(&owner->buftype, &view));
    set_shape(&strange, "strange", 1, 1, 1);
    CHECK(place(&owner->buftype.type, other, 1) == NULL);
    buffer_free(buffer);
    destroy(owner);
}

static struct ggml_backend_buffer *
refuse(struct ggml_backend_buffer_type *type, struct ggml_backend_buffer_i iface,
       void *context, size_t size)
{
    (void)type, (void)iface, (void)context, (void)size;
    return NULL;
}

static void
test_what_can_not_be_had_is_refused(void)
{
    struct owner owner = {0};
    CHECK(buftype_init(&owner.buftype, &ggml, SIZE_MAX, take, &owner) == -ENOMEM);
    CHECK(buftype_init(&owner.buftype, &ggml, SIZE_MAX / 4, take, &owner) == -ENOMEM);
    buftype_deinit(&owner.buftype);
    struct ggml_functions other = ggml;
    CHECK(buftype_init(&owner.buftype, &other, 1, take, &owner) == 0);
    struct ggml_backend_buffer_type *type = &owner.buftype.type;
    CHECK(type->iface.alloc_buffer(type, SIZE_MAX / 4) == NULL);
    other.buffer_init = refuse;
    CHECK(type->iface.alloc_buffer(type, 1) == NULL);
    buftype_deinit(&owner.buftype);
}

int
main(void)
{
    test_only_the_ggml_that_is_known_passes();
    test_what_is_placed_has_addresses_of_its_own_without_memory();
    test_the_loader_may_write_to_all_of_the_largest_tensor();
    test_views_are_not_told_and_strange_tensors_are_refused();
    test_what_can_not_be_had_is_refused();
    return 0;
}
