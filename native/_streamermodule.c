/* headrace.native._streamer: the Python face of direct.h and readers.h (and, in
 * _streamtype.c, of stream.h).
 *
 * Parses arguments, holds buffers, releases the GIL around all that blocks, raises.
 * Fields of a reader are guarded by the GIL.
 */

#include "_streamtype.h"

#include <errno.h>
#include <string.h>
#include <structmember.h>

#include "direct.h"
#include "readers.h"

struct module_state {
    PyTypeObject *stats_type;
};

struct reader {
    PyObject_HEAD
    struct direct_file file;
    struct readers *pool;   /* NULL: closed */
    PyObject *path;         /* str or bytes, for errors */
    Py_ssize_t n_in_flight; /* batches being read; while any, no close */
};

/* One range on its way into one buffer. */
struct transfer {
    struct readers_request request;
    Py_buffer buffer;
};

/* Return whether self is open, with an exception if not. */
static bool
is_open(const struct reader *self)
{
    if (self->pool == NULL) {
        PyErr_SetString(PyExc_ValueError, "reader is closed");
    }
    return self->pool != NULL;
}

/* Read batch without the GIL; the reader is open and stays so meanwhile. */
static void
read_batch(struct reader *self, struct readers_batch *batch)
{
    self->n_in_flight++;
    Py_BEGIN_ALLOW_THREADS
    readers_submit(self->pool, batch);
    readers_wait(self->pool, batch);
    Py_END_ALLOW_THREADS
    self->n_in_flight--;
}

/* Raise the OSError of -error about the reader's file, in words that it owns from now. */
static void
raise_os_error(const struct reader *self, int error, PyObject *text)
{
    if (text == NULL) {
        return;
    }
    PyObject *exception =
        PyObject_CallFunction(PyExc_OSError, "iOO", -error, text, self->path);
    Py_DECREF(text);
    if (exception != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
        Py_DECREF(exception);
    }
}

static void
raise_failed(const struct reader *self, const struct readers_request *request)
{
    int error = (int)request->result;
    raise_os_error(self, error,
                   PyUnicode_FromFormat("%s, reading %zu bytes at offset %llu",
                                        strerror(-error), request->len,
                                        (unsigned long long)request->offset));
}

/* Return whether offset is one, with an exception if not. */
static bool
is_valid_offset(long long offset)
{
    if (offset < 0) {
        PyErr_Format(PyExc_ValueError, "offset is %lld, expected 0 or more", offset);
    }
    return offset >= 0;
}

/* Fill transfer from an (offset, buffer) pair; from then on it holds the buffer. */
static bool
parse_transfer(struct reader *self, struct transfer *transfer, PyObject *pair)
{
    if (!PyTuple_Check(pair)) {
        PyErr_Format(PyExc_TypeError, "request is %R, expected a pair (offset, buffer)",
                     (PyObject *)Py_TYPE(pair));
        return false;
    }
    long long offset;
    if (!PyArg_ParseTuple(pair, "Lw*;a request is (offset, buffer)", &offset,
                          &transfer->buffer)) {
        return false;
    }
    if (!is_valid_offset(offset)) {
        PyBuffer_Release(&transfer->buffer);
        return false;
    }
    transfer->request = (struct readers_request){
        .file = &self->file,
        .offset = (uint64_t)offset,
        .len = (size_t)transfer->buffer.len,
        .data = transfer->buffer.buf,
    };
    return true;
}

/* Return the list of bytes read, or NULL with the exception of the first failure. */
static PyObject *
collect_results(struct reader *self, const struct readers_batch *batch, Py_ssize_t n)
{
    PyObject *results = PyList_New(n);
    if (results == NULL) {
        return NULL;
    }
    Py_ssize_t i = 0;
    for (const struct readers_request *r = batch->first; r != NULL; r = r->next) {
        PyObject *result = NULL;
        if (r->result < 0) {
            raise_failed(self, r);
        } else {
            result = PyLong_FromSsize_t(r->result);
        }
        if (result == NULL) {
            Py_DECREF(results);
            return NULL;
        }
        (void)PyList_SetItem(results, i++, result);
    }
    return results;
}

PyDoc_STRVAR(read_into_doc,
"read_into($self, requests, /)\n--\n\n"
"Fill the buffer of each (offset, buffer) pair in requests with the file's bytes.\n\n"
"All are in flight at once, issued in their order. Returns the bytes read of each;\n"
"fewer than its buffer holds at the end of the file and nowhere else. Buffers must\n"
"not overlap. OSError with errno and filename for the first request that failed;\n"
"then the contents of the buffers are indeterminate.");

static PyObject *
reader_read_into(PyObject *op, PyObject *requests)
{
    struct reader *self = (struct reader *)op;
    PyObject *results = NULL;
    struct transfer *transfers = NULL;
    Py_ssize_t n_parsed = 0;
    struct readers_batch batch = {0};
    PyObject *pairs = PySequence_Tuple(requests);
    if (pairs == NULL) {
        goto out;
    }
    Py_ssize_t n = PyTuple_Size(pairs);
    transfers = PyMem_Calloc((size_t)n, sizeof *transfers);
    if (transfers == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    for (; n_parsed < n; n_parsed++) {
        PyObject *pair = PyTuple_GetItem(pairs, n_parsed);
        if (!parse_transfer(self, &transfers[n_parsed], pair)) {
            goto out;
        }
        readers_batch_add(&batch, &transfers[n_parsed].request);
    }
    /* Only now: parsing runs foreign code, which may close the reader. */
    if (!is_open(self)) {
        goto out;
    }
    read_batch(self, &batch);
    results = collect_results(self, &batch, n);
out:
    while (n_parsed > 0) {
        PyBuffer_Release(&transfers[--n_parsed].buffer);
    }
    PyMem_Free(transfers);
    Py_XDECREF(pairs);
    return results;
}

static PyObject *
reader_read(PyObject *op, PyObject *args, PyObject *kwargs)
{
    struct reader *self = (struct reader *)op;
    static char *names[] = {"offset", "n_bytes", NULL};
    long long offset;
    Py_ssize_t n_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Ln:read", names, &offset, &n_bytes)
        || !is_valid_offset(offset)) {
        return NULL;
    }
    if (n_bytes < 0) {
        return PyErr_Format(PyExc_ValueError, "n_bytes is %zd, expected 0 or more",
                            n_bytes);
    }
    PyObject *bytes = is_open(self) ? PyBytes_FromStringAndSize(NULL, n_bytes) : NULL;
    if (bytes == NULL) {
        return NULL;
    }
    struct readers_request request = {
        .file = &self->file,
        .offset = (uint64_t)offset,
        .len = (size_t)n_bytes,
        .data = PyBytes_AsString(bytes),
    };
    struct readers_batch batch = {0};
    readers_batch_add(&batch, &request);
    read_batch(self, &batch);
    if (request.result == n_bytes) {
        return bytes;
    }
    PyObject *shorter = NULL;
    if (request.result < 0) {
        raise_failed(self, &request);
    } else {
        shorter = PyBytes_FromStringAndSize(PyBytes_AsString(bytes), request.result);
    }
    Py_DECREF(bytes);
    return shorter;
}

static PyObject *
reader_stats(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    struct reader *self = (struct reader *)op;
    if (!is_open(self)) {
        return NULL;
    }
    struct readers_stats stats = readers_get_stats(self->pool);
    const struct module_state *state = PyType_GetModuleState(Py_TYPE(op));
    PyObject *result = PyStructSequence_New(state->stats_type);
    if (result == NULL) {
        return NULL;
    }
    const uint64_t values[] = {stats.bytes_read, stats.n_reads, stats.busy_ns};
    for (Py_ssize_t i = 0; i < 3; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(values[i]);
        if (value == NULL) {
            Py_DECREF(result);
            return NULL;
        }
        PyStructSequence_SetItem(result, i, value);
    }
    return result;
}

/* End the threads and close the file of a reader that nobody uses. */
static void
close_reader(struct reader *self)
{
    struct readers *pool = self->pool;
    struct direct_file file = self->file;
    self->pool = NULL;
    self->file.fd = -1;
    Py_BEGIN_ALLOW_THREADS
    readers_destroy(pool);
    direct_close(&file);
    Py_END_ALLOW_THREADS
}

static PyObject *
reader_close(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    struct reader *self = (struct reader *)op;
    if (self->n_in_flight > 0) {
        errno = EBUSY;
        return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, self->path);
    }
    close_reader(self);
    return Py_NewRef(Py_None);
}

static PyObject *
reader_enter(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    return is_open((struct reader *)op) ? Py_NewRef(op) : NULL;
}

static PyObject *
reader_exit(PyObject *op, PyObject *Py_UNUSED(exc_info))
{
    return reader_close(op, NULL);
}

/* Open the file and start the threads. False, with an exception: drop self. */
static bool
open_reader(struct reader *self, int n_threads, bool wants_direct)
{
    PyObject *encoded;
    if (!PyUnicode_FSConverter(self->path, &encoded)) {
        return false;
    }
    const char *path = PyBytes_AsString(encoded);
    /* What is streamed is larger than memory: the page cache has no use for it. */
    unsigned flags = DIRECT_DROP_CACHE | (wants_direct ? 0u : DIRECT_BUFFERED);
    int open_error;
    int threads_error = 0;
    Py_BEGIN_ALLOW_THREADS
    open_error = direct_open(&self->file, path, flags);
    if (open_error == 0) {
        threads_error = readers_create(&self->pool, (unsigned)n_threads);
    }
    Py_END_ALLOW_THREADS
    Py_DECREF(encoded);
    if (open_error != 0) {
        errno = -open_error;
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, self->path);
    } else if (threads_error != 0) {
        raise_os_error(self, threads_error,
                       PyUnicode_FromFormat("can't start %d reader threads: %s", n_threads,
                                            strerror(-threads_error)));
    }
    return open_error == 0 && threads_error == 0;
}

static PyObject *
reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path", "n_threads", "direct", NULL};
    PyObject *path;
    int n_threads = 4;
    int wants_direct = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|ip:Reader", names, &path,
                                     &n_threads, &wants_direct)) {
        return NULL;
    }
    if (n_threads < 1 || n_threads > (int)READERS_MAX_THREADS) {
        return PyErr_Format(PyExc_ValueError, "n_threads is %d, expected 1 to %d",
                            n_threads, (int)READERS_MAX_THREADS);
    }
    struct reader *self = (struct reader *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->file.fd = -1;
    self->path = PyOS_FSPath(path);
    if (self->path == NULL || !open_reader(self, n_threads, wants_direct != 0)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
reader_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((struct reader *)op)->path);
    return 0;
}

static void
reader_dealloc(PyObject *op)
{
    struct reader *self = (struct reader *)op;
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    close_reader(self);
    Py_CLEAR(self->path);
    PyObject_GC_Del(op);
    Py_DECREF(type);
}

static PyMethodDef reader_methods[] = {
    {"read_into", reader_read_into, METH_O, read_into_doc},
    {"read", (PyCFunction)(void (*)(void))reader_read, METH_VARARGS | METH_KEYWORDS,
     "read($self, /, offset, n_bytes)\n--\n\n"
     "Return n_bytes at offset; fewer at the end of the file."},
    {"stats", reader_stats, METH_NOARGS,
     "stats($self, /)\n--\n\nReturn what was read since the reader was opened."},
    {"close", reader_close, METH_NOARGS,
     "close($self, /)\n--\n\n"
     "End the threads and close the file; a closed reader stays closed.\n\n"
     "OSError with EBUSY while a read is in flight."},
    {"__enter__", reader_enter, METH_NOARGS,
     "__enter__($self, /)\n--\n\nReturn the reader, which must be open."},
    {"__exit__", reader_exit, METH_VARARGS,
     "__exit__($self, /, *exc_info)\n--\n\nClose the reader."},
    {0},
};

static PyMemberDef reader_members[] = {
    {"size", T_ULONGLONG, offsetof(struct reader, file.size_bytes), READONLY,
     "Bytes in the file when it was opened."},
    {"is_direct", T_BOOL, offsetof(struct reader, file.is_direct), READONLY,
     "Whether reads bypass the page cache (O_DIRECT); else they are buffered."},
    {"block_bytes", T_PYSSIZET, offsetof(struct reader, file.block_bytes), READONLY,
     "Ranges and buffers that are multiples of it are read without a copy."},
    {0},
};

PyDoc_STRVAR(reader_doc,
"Reader(path, n_threads=4, direct=True)\n--\n\n"
"Read the file at path, n_threads reads at once, and leave no page cache behind.\n\n"
"If the file system refuses direct reads (see is_direct), or direct is False, they\n"
"are buffered, and their pages dropped. Any thread may read.");

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, (void *)reader_doc},
    {Py_tp_new, reader_new},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_traverse, reader_traverse},
    {Py_tp_methods, reader_methods},
    {Py_tp_members, reader_members},
    {0},
};

static PyType_Spec reader_spec = {
    .name = "headrace.native._streamer.Reader",
    .basicsize = sizeof(struct reader),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = reader_slots,
};

static PyStructSequence_Field stats_fields[] = {
    {"bytes_read", "Bytes that arrived in buffers."},
    {"n_reads", "Reads of at most 1 MiB that brought them."},
    {"busy_ns", "Time during which at least one read was in flight."},
    {0},
};

static PyStructSequence_Desc stats_desc = {
    .name = "headrace.native._streamer.ReaderStats",
    .doc = "Counters of a reader.",
    .fields = stats_fields,
    .n_in_sequence = 3,
};

static int
module_exec(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);
    state->stats_type = PyStructSequence_NewType(&stats_desc);
    if (state->stats_type == NULL || PyModule_AddType(module, state->stats_type) < 0) {
        return -1;
    }
    PyObject *reader_type = PyType_FromModuleAndSpec(module, &reader_spec, NULL);
    if (reader_type == NULL) {
        return -1;
    }
    int result = PyModule_AddType(module, (PyTypeObject *)reader_type);
    Py_DECREF(reader_type);
    return result < 0 ? result : streamtype_add(module);
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct module_state *state = PyModule_GetState(module);
    Py_VISIT(state->stats_type);
    return 0;
}

static int
module_clear(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->stats_type);
    return 0;
}

static void
module_free(void *module)
{
    (void)module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_streamer",
    .m_doc = "Direct reads of files, many in flight, and weights streamed by them.",
    .m_size = sizeof(struct module_state),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__streamer(void)
{
    return PyModuleDef_Init(&module_def);
}
