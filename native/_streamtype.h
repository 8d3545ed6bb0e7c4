/* headrace.native._streamer.Stream: the Python face of stream.h. */

#ifndef HEADRACE_STREAMTYPE_H
#define HEADRACE_STREAMTYPE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

/* Add Stream and StreamStats to module. Returns 0, or -1 with an exception. */
int streamtype_add(PyObject *module);

#endif
