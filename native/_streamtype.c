#include "_streamtype.h"

#include <errno.h>
#include <structmember.h>
#include <string.h>

#include "_streamarguments.h"

struct stream_object {
    PyObject_HEAD
    struct stream *stream;  /* NULL: closed */
    PyObject *paths;        /* tuple of bytes */
    PyObject *header;       /* bytes, which extents point into */
};

/* Raise the OSError of -error about a file, or about none. */
static void
raise_os_error(const struct stream_object *self, int error, unsigned file)
{
    errno = -error;
    if (file < (unsigned)PyTuple_Size(self->paths)) {
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError,
                                             PyTuple_GetItem(self->paths, file));
    } else {
        PyErr_SetFromErrno(PyExc_OSError);
    }
}

static bool
open_stream(struct stream_object *self, const struct stream_config *config)
{
    unsigned failed;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = stream_open(&self->stream, config, &failed);
    Py_END_ALLOW_THREADS
    if (error != 0) {
        raise_os_error(self, error, failed);
    }
    return error == 0;
}

static PyObject *
stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"functions", "paths", "header", "extents", "weights",
                            "pool_records", "n_ring_slots", "n_threads", "direct",
                            "policy", "lookahead", NULL};
    PyObject *functions, *paths, *header, *extents, *weights, *pool_records;
    unsigned n_ring_slots, n_threads;
    int wants_direct = 1, policy = POLICY_LRFU, lookahead = LOOKAHEAD_MEASURED;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!SO!O!O!II|pii:Stream", names, &PyTuple_Type, &functions,
            &PyTuple_Type, &paths, &header, &PyTuple_Type, &extents, &PyTuple_Type,
            &weights, &PyTuple_Type, &pool_records, &n_ring_slots, &n_threads,
            &wants_direct, &policy, &lookahead)) {
        return NULL;
    }
    struct stream_object *self = (struct stream_object *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->paths = Py_NewRef(paths);
    self->header = Py_NewRef(header);
    struct stream_arguments a = {0};
    bool is_open = stream_arguments_parse(&a, functions, paths, header, extents, weights,
                                          pool_records);
    if (is_open) {
        struct stream_config config = {
            .ggml = &a.ggml, .paths = a.paths, .n_files = (unsigned)a.n_paths,
            .n_threads = n_threads, .is_buffered = wants_direct == 0,
            .extents = a.extents, .n_extents = (size_t)a.n_extents,
            .weights = a.weights, .n_weights = (unsigned)a.n_weights,
            .pool_records = a.pool_records, .n_pools = (unsigned)a.n_pools,
            .n_ring_slots = n_ring_slots, .policy = (enum policy_kind)policy,
            .lookahead = (enum lookahead_mode)lookahead,
        };
        is_open = open_stream(self, &config);
    }
    stream_arguments_free(&a);
    if (!is_open) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static bool
check_open(const struct stream_object *self)
{
    if (self->stream == NULL) {
        PyErr_SetString(PyExc_ValueError, "stream is closed");
    }
    return self->stream != NULL;
}

/* Return (errno, path or None, offset, length, node, weight), or None without fault. */
static PyObject *
describe_fault(const struct stream_object *self, const struct callback_fault *fault)
{
    const struct fault *read = &fault->read;
    if (read->error == 0) {
        return Py_NewRef(Py_None);
    }
    /* Only a range that was asked for has a length: without one no file is to blame. */
    PyObject *path = read->len > 0 ? PyTuple_GetItem(self->paths, read->file) : Py_None;
    return Py_BuildValue("(iOKKss)", -read->error, path, (unsigned long long)read->offset,
                         (unsigned long long)read->len, fault->node, fault->weight);
}

static PyObject *
stream_load_fault_method(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    struct stream_object *self = (struct stream_object *)op;
    if (!check_open(self)) {
        return NULL;
    }
    struct callback_fault fault = {.read = stream_load_fault(self->stream)};
    return describe_fault(self, &fault);
}

static PyObject *
stream_start_method(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    struct stream_object *self = (struct stream_object *)op;
    if (!check_open(self)) {
        return NULL;
    }
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = stream_start(self->stream);
    Py_END_ALLOW_THREADS
    if (error != 0) {
        raise_os_error(self, error, UINT32_MAX);
        return NULL;
    }
    return Py_NewRef(Py_None);
}

static PyObject *
stream_finish_method(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    struct stream_object *self = (struct stream_object *)op;
    if (!check_open(self)) {
        return NULL;
    }
    struct callback_fault fault;
    Py_BEGIN_ALLOW_THREADS
    fault = stream_finish(self->stream);
    Py_END_ALLOW_THREADS
    return describe_fault(self, &fault);
}

static PyObject *
stream_stats_method(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    struct stream_object *self = (struct stream_object *)op;
    if (!check_open(self)) {
        return NULL;
    }
    struct stream_stats s = stream_get_stats(self->stream);
    const uint64_t values[] = {
        s.reads.bytes_read, s.reads.n_reads, s.reads.busy_ns, s.n_hits, s.n_misses,
        s.n_evictions, s.n_guesses, s.n_useful, s.n_late, s.n_ahead, s.n_demand, s.stall_ns,
        s.resident_bytes};
    PyObject *module = PyType_GetModule(Py_TYPE(op));
    PyObject *type = PyObject_GetAttrString(module, "StreamStats");
    PyObject *result = type == NULL ? NULL : PyStructSequence_New((PyTypeObject *)type);
    Py_XDECREF(type);
    for (Py_ssize_t i = 0; result != NULL && i < 13; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(values[i]);
        if (value == NULL) {
            Py_CLEAR(result);
        } else {
            PyStructSequence_SetItem(result, i, value);
        }
    }
    return result;
}

static PyObject *
stream_uses_method(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    struct stream_object *self = (struct stream_object *)op;
    if (!check_open(self)) {
        return NULL;
    }
    size_t n = stream_n_experts(self->stream);
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(n * sizeof(uint32_t)));
    if (result != NULL) {
        stream_get_uses(self->stream, (uint32_t *)(void *)PyBytes_AsString(result));
    }
    return result;
}

static PyObject *
stream_fill_method(PyObject *op, PyObject *experts)
{
    struct stream_object *self = (struct stream_object *)op;
    if (!check_open(self) || !PyTuple_Check(experts)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "experts must be a tuple");
        }
        return NULL;
    }
    uint32_t numbers[STREAM_MAX_FILL];
    size_t n = 0;
    for (; n < STREAM_MAX_FILL && (Py_ssize_t)n < PyTuple_Size(experts); n++) {
        unsigned long number = PyLong_AsUnsignedLong(PyTuple_GetItem(experts, (Py_ssize_t)n));
        if (PyErr_Occurred()) {
            return NULL;
        }
        numbers[n] = number > UINT32_MAX ? UINT32_MAX : (uint32_t)number;
    }
    size_t n_read;
    Py_BEGIN_ALLOW_THREADS
    n_read = stream_fill(self->stream, numbers, n);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(n_read);
}

static PyObject *
stream_resize_method(PyObject *op, PyObject *args)
{
    struct stream_object *self = (struct stream_object *)op;
    unsigned pool;
    unsigned long long n_records;
    if (!check_open(self) || !PyArg_ParseTuple(args, "IK:resize", &pool, &n_records)) {
        return NULL;
    }
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = stream_resize(self->stream, pool, (size_t)n_records);
    Py_END_ALLOW_THREADS
    if (error != 0) {
        raise_os_error(self, error, UINT32_MAX);
        return NULL;
    }
    return Py_NewRef(Py_None);
}

static PyObject *
stream_close_method(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    struct stream_object *self = (struct stream_object *)op;
    struct stream *stream = self->stream;
    self->stream = NULL;
    Py_BEGIN_ALLOW_THREADS
    stream_close(stream);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

/* Return the address of something of an open stream; which is closure. */
static PyObject *
stream_get_address(PyObject *op, void *closure)
{
    struct stream_object *self = (struct stream_object *)op;
    if (!check_open(self)) {
        return NULL;
    }
    const char *which = closure;
    uintptr_t address;
    if (strcmp(which, "file") == 0) {
        address = (uintptr_t)stream_file(self->stream);
    } else if (strcmp(which, "buffer_type") == 0) {
        address = (uintptr_t)stream_buffer_type(self->stream);
    } else if (strcmp(which, "eval") == 0) {
        address = (uintptr_t)&callback_eval;
    } else if (strcmp(which, "abort") == 0) {
        address = (uintptr_t)&callback_abort;
    } else {
        address = (uintptr_t)stream_callback(self->stream);
    }
    return PyLong_FromUnsignedLongLong(address);
}

static PyObject *
stream_get_is_direct(PyObject *op, void *Py_UNUSED(closure))
{
    struct stream_object *self = (struct stream_object *)op;
    return check_open(self) ? PyBool_FromLong(stream_is_direct(self->stream)) : NULL;
}

static int
stream_traverse(PyObject *op, visitproc visit, void *arg)
{
    struct stream_object *self = (struct stream_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->paths);
    Py_VISIT(self->header);
    return 0;
}

static void
stream_dealloc(PyObject *op)
{
    struct stream_object *self = (struct stream_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    stream_close(self->stream);
    Py_CLEAR(self->paths);
    Py_CLEAR(self->header);
    PyObject_GC_Del(op);
    Py_DECREF(type);
}

static PyMethodDef stream_methods[] = {
    {"load_fault", stream_load_fault_method, METH_NOARGS,
     "load_fault($self, /)\n--\n\nReturn the first fault of reads through file, or None."},
    {"start", stream_start_method, METH_NOARGS,
     "start($self, /)\n--\n\n"
     "Take the memory that weights are streamed through; after the model was loaded."},
    {"finish", stream_finish_method, METH_NOARGS,
     "finish($self, /)\n--\n\n"
     "End a pass and return its fault, or None.\n\n"
     "A fault is (errno, path or None, offset, length, node, weight)."},
    {"stats", stream_stats_method, METH_NOARGS,
     "stats($self, /)\n--\n\nReturn what happened since the stream was opened."},
    {"uses", stream_uses_method, METH_NOARGS,
     "uses($self, /)\n--\n\n"
     "Return how many passes used each routed expert, uint32 block by block in the order of\n"
     "pools; from any thread."},
    {"fill", stream_fill_method, METH_O,
     "fill($self, experts, /)\n--\n\n"
     "Read experts, numbers in the order of uses, 64 at most, into records that are free.\n\n"
     "Between passes. Returns how many were read."},
    {"resize", stream_resize_method, METH_VARARGS,
     "resize($self, pool, n_records, /)\n--\n\n"
     "Use only the first records of a pool, at most those that it was made with.\n\n"
     "Between passes. The memory of others is given back, or taken again (OSError)."},
    {"close", stream_close_method, METH_NOARGS,
     "close($self, /)\n--\n\nFree all; contexts and model must be freed before."},
    {0},
};

static PyGetSetDef stream_getset[] = {
    {"file", stream_get_address, NULL, "FILE * to load the model from; 0 once started.", "file"},
    {"buffer_type", stream_get_address, NULL, "Buffer type of the streamed weights.",
     "buffer_type"},
    {"eval_callback", stream_get_address, NULL, "For cb_eval of a context.", "eval"},
    {"abort_callback", stream_get_address, NULL, "For abort_callback of a context.",
     "abort"},
    {"user_data", stream_get_address, NULL, "What both callbacks are to be given.", "user"},
    {"is_direct", stream_get_is_direct, NULL,
     "Whether all files are read past the page cache.", NULL},
    {0},
};

PyDoc_STRVAR(stream_doc,
"Stream(functions, paths, header, extents, weights, pool_records, n_ring_slots,\n"
"       n_threads, direct=True, policy=3, lookahead=1)\n--\n\n"
"Stream the weights of one model from its files; see stream.h for order and meaning.\n\n"
"functions: addresses of ggml_version, ggml_backend_cpu_buffer_type,\n"
"ggml_backend_buft_name, ggml_backend_buffer_init and ggml_backend_tensor_get.\n"
"extents: (start, length, kind, file, offset); kind 0 is header, 1 a file, 2 streamed.\n"
"weights: (name, file, offset, length, block or -1, experts, pool).\n"
"policy: 0 LRU, 1 LFU, 2 MRU, 3 LRFU; lookahead: 0 off, 1 if it is measured to pay, 2 on.\n"
"OSError with ENOTSUP if ggml is not the version whose layout is known.");

static PyType_Slot stream_slots[] = {
    {Py_tp_doc, (void *)stream_doc},
    {Py_tp_new, stream_new},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_traverse, stream_traverse},
    {Py_tp_methods, stream_methods},
    {Py_tp_getset, stream_getset},
    {0},
};

static PyType_Spec stream_spec = {
    .name = "headrace.native._streamer.Stream",
    .basicsize = sizeof(struct stream_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = stream_slots,
};

static PyStructSequence_Field stats_fields[] = {
    {"bytes_read", "Bytes read from the files."},
    {"n_reads", "Reads of at most 1 MiB that brought them."},
    {"busy_ns", "Time during which at least one read was in flight."},
    {"n_hits", "Experts that were in memory when they were chosen."},
    {"n_misses", "Experts that had to be read."},
    {"n_evictions", "Experts given up for others."},
    {"n_guesses", "Experts read because they were likely to be chosen."},
    {"n_useful", "Guesses that were chosen while they were in memory."},
    {"n_late", "Useful guesses that had to be waited for."},
    {"n_ahead", "Dense tensors that were asked for in the order expected."},
    {"n_demand", "Dense tensors that were not."},
    {"stall_ns", "Time that evaluation waited for reads."},
    {"resident_bytes", "Memory that weights are streamed through."},
    {0},
};

static PyStructSequence_Desc stats_desc = {
    .name = "headrace.native._streamer.StreamStats",
    .doc = "Counters of a stream.",
    .fields = stats_fields,
    .n_in_sequence = 13,
};

int
streamtype_add(PyObject *module)
{
    PyTypeObject *stats_type = PyStructSequence_NewType(&stats_desc);
    if (stats_type == NULL) {
        return -1;
    }
    int result = PyModule_AddType(module, stats_type);
    Py_DECREF(stats_type);
    PyObject *type = PyType_FromModuleAndSpec(module, &stream_spec, NULL);
    if (result < 0 || type == NULL) {
        Py_XDECREF(type);
        return -1;
    }
    result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}
