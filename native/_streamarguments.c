#include "_streamarguments.h"

#include <string.h>

void
stream_arguments_free(struct stream_arguments *arguments)
{
    PyMem_Free(arguments->paths);
    PyMem_Free(arguments->extents);
    PyMem_Free(arguments->weights);
    PyMem_Free(arguments->pool_records);
}

static bool
parse_functions(struct ggml_functions *ggml, PyObject *addresses)
{
    unsigned long long a[5];
    if (!PyArg_ParseTuple(addresses, "KKKKK;functions are five addresses", &a[0], &a[1],
                          &a[2], &a[3], &a[4])) {
        return false;
    }
    ggml->version = (const char *(*)(void))(uintptr_t)a[0];
    ggml->cpu_buffer_type = (struct ggml_backend_buffer_type *(*)(void))(uintptr_t)a[1];
    ggml->buffer_type_name =
        (const char *(*)(struct ggml_backend_buffer_type *))(uintptr_t)a[2];
    ggml->buffer_init = (struct ggml_backend_buffer *(*)(
        struct ggml_backend_buffer_type *, struct ggml_backend_buffer_i, void *,
        size_t))(uintptr_t)a[3];
    ggml->tensor_get = (void (*)(const struct ggml_tensor *, void *, size_t,
                                 size_t))(uintptr_t)a[4];
    return true;
}

/* Return an array for the items of a tuple, zeroed, and their number; NULL: exception. */
static void *
allocate(PyObject *tuple, size_t item_bytes, Py_ssize_t *n)
{
    *n = PyTuple_Size(tuple);
    if (*n < 0) {
        return NULL;
    }
    void *items = PyMem_Calloc((size_t)*n + 1, item_bytes);
    return items != NULL ? items : PyErr_NoMemory();
}

static bool
parse_paths(struct stream_arguments *arguments, PyObject *paths)
{
    arguments->paths = allocate(paths, sizeof *arguments->paths, &arguments->n_paths);
    for (Py_ssize_t i = 0; arguments->paths != NULL && i < arguments->n_paths; i++) {
        arguments->paths[i] = PyBytes_AsString(PyTuple_GetItem(paths, i));
        if (arguments->paths[i] == NULL) {
            return false;
        }
    }
    return arguments->paths != NULL;
}

static bool
parse_extents(struct stream_arguments *arguments, PyObject *extents, PyObject *header)
{
    arguments->extents =
        allocate(extents, sizeof *arguments->extents, &arguments->n_extents);
    for (Py_ssize_t i = 0; arguments->extents != NULL && i < arguments->n_extents; i++) {
        struct vfile_extent *e = &arguments->extents[i];
        unsigned long long start, len, offset;
        int kind;
        if (!PyArg_ParseTuple(PyTuple_GetItem(extents, i), "KKiIK", &start, &len, &kind,
                              &e->file, &offset)) {
            return false;
        }
        *e = (struct vfile_extent){
            .start = start, .len = len, .kind = (enum vfile_kind)kind, .file = e->file,
            .offset = offset};
        bool is_valid = kind == VFILE_MEMORY
                            ? len <= (unsigned long long)PyBytes_Size(header)
                            : (kind == VFILE_FILE || kind == VFILE_STREAMED)
                                  && e->file < (unsigned)arguments->n_paths;
        if (!is_valid) {
            PyErr_Format(PyExc_ValueError, "extent %zd has no such memory or file", i);
            return false;
        }
        e->data = PyBytes_AsString(header);
    }
    return arguments->extents != NULL;
}

static bool
parse_weights(struct stream_arguments *arguments, PyObject *weights)
{
    arguments->weights =
        allocate(weights, sizeof *arguments->weights, &arguments->n_weights);
    for (Py_ssize_t i = 0; arguments->weights != NULL && i < arguments->n_weights; i++) {
        struct stream_weight *w = &arguments->weights[i];
        const char *name;
        unsigned long long offset, len;
        if (!PyArg_ParseTuple(PyTuple_GetItem(weights, i), "yIKKiII", &name, &w->file,
                              &offset, &len, &w->block, &w->n_experts, &w->pool)) {
            return false;
        }
        if (strlen(name) >= sizeof w->name || w->file >= (unsigned)arguments->n_paths
            || (w->block >= 0 && w->pool >= (unsigned)arguments->n_pools)) {
            PyErr_Format(PyExc_ValueError, "weight %zd has no such file, pool or name", i);
            return false;
        }
        strcpy(w->name, name);
        w->offset = offset;
        w->len = len;
    }
    return arguments->weights != NULL;
}

static bool
parse_pools(struct stream_arguments *arguments, PyObject *pool_records)
{
    arguments->pool_records =
        allocate(pool_records, sizeof *arguments->pool_records, &arguments->n_pools);
    for (Py_ssize_t i = 0; arguments->pool_records != NULL && i < arguments->n_pools; i++) {
        arguments->pool_records[i] = PyLong_AsSize_t(PyTuple_GetItem(pool_records, i));
    }
    return arguments->pool_records != NULL && !PyErr_Occurred();
}

bool
stream_arguments_parse(struct stream_arguments *arguments, PyObject *functions,
                       PyObject *paths, PyObject *header, PyObject *extents,
                       PyObject *weights, PyObject *pool_records)
{
    return parse_functions(&arguments->ggml, functions) && parse_paths(arguments, paths)
           && parse_pools(arguments, pool_records)
           && parse_extents(arguments, extents, header)
           && parse_weights(arguments, weights);
}
