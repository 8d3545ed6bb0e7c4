/* What a Stream is made of, from Python's values to those of stream.h. */

#ifndef HEADRACE_STREAMARGUMENTS_H
#define HEADRACE_STREAMARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "stream.h"

/* The arrays are ours, what they point to is the arguments'. */
struct stream_arguments {
    struct ggml_functions ggml;
    const char **paths;
    struct vfile_extent *extents;
    struct stream_weight *weights;
    size_t *pool_records;
    Py_ssize_t n_paths, n_extents, n_weights, n_pools;
};

/* Fill arguments, which are = {0}, from six tuples and bytes as Stream's doc has them.
 * Returns false with an exception; free them in any case. */
bool stream_arguments_parse(struct stream_arguments *arguments, PyObject *functions,
                            PyObject *paths, PyObject *header, PyObject *extents,
                            PyObject *weights, PyObject *pool_records);

void stream_arguments_free(struct stream_arguments *arguments);

#endif
