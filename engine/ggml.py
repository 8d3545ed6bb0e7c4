"""Functions of ggml that llama-cpp-python does not declare: its devices, and single products.

In: memory, shapes, types by number. Out: computed graphs, a list of GPUs. The library is the one
that llama.py loaded. Knows no model.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine import llama
from headrace.engine.errors import EngineError
from headrace.engine.profile import GpuDevice

Bytes = npt.NDArray[np.uint8]

# enum ggml_type
F32, I32 = 0, 26
# enum ggml_backend_dev_type: with memory of its own, and sharing the machine's.
_GPU, _INTEGRATED_GPU = 1, 2
# ggml-impl.h, TENSOR_ALIGNMENT; a cache line's size is no less.
_ALIGN_BYTES = 64
_MAX_TENSORS = 512


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", ctypes.c_bool))


# Name → result and arguments: ggml.h, ggml-backend.h, ggml-cpu.h.
_DECLARATIONS: dict[str, tuple[Any, ...]] = {
    "ggml_init": (c_void_p, _InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead": (c_size_t,),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_quantize_chunk": (c_size_t, c_int, *[c_void_p] * 2, *[c_int64] * 3, c_void_p),
    "ggml_new_tensor": (c_void_p, c_void_p, c_int, c_int, ctypes.POINTER(c_int64)),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_mul_mat_id": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_free": (None, c_void_p),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_tensor_alloc": (c_int, c_void_p, c_void_p, c_void_p),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_dev_count": (c_size_t,),
    "ggml_backend_dev_get": (c_void_p, c_size_t),
    "ggml_backend_dev_type": (c_int, c_void_p),
    "ggml_backend_dev_name": (c_char_p, c_void_p),
    "ggml_backend_dev_description": (c_char_p, c_void_p),
    "ggml_backend_dev_memory": (None, c_void_p, *[ctypes.POINTER(c_size_t)] * 2),
}


def _call(name: str, *arguments: Any) -> Any:
    """Call a function of ggml; like all ctypes calls without the GIL."""
    function = getattr(llama.library(), name)
    function.restype, *function.argtypes = _DECLARATIONS[name]
    return function(*arguments)


def list_gpus() -> tuple[GpuDevice, ...]:
    """Return the GPUs that this build of ggml can use, with their memory now."""
    gpus = []
    for i in range(_call("ggml_backend_dev_count")):
        device = _call("ggml_backend_dev_get", i)
        kind = _call("ggml_backend_dev_type", device)
        if kind in (_GPU, _INTEGRATED_GPU):
            free, total = c_size_t(), c_size_t()
            _call("ggml_backend_dev_memory", device, ctypes.byref(free), ctypes.byref(total))
            name, description = (
                _call(f"ggml_backend_dev_{what}", device).decode(errors="replace")
                for what in ("name", "description")
            )
            is_integrated = kind == _INTEGRATED_GPU
            gpus.append(
                GpuDevice(name, description, total.value, free.value, is_integrated=is_integrated)
            )
    return tuple(gpus)


def row_bytes(type_id: int, n_columns: int) -> int:
    """Return the bytes of a row of n_columns, a multiple of the type's block, of that type."""
    return int(_call("ggml_row_size", type_id, n_columns))


def quantize(values: npt.NDArray[np.float32], type_id: int) -> Bytes:
    """Return the rows of values, (n_rows, n_columns), as bytes of that type."""
    n_rows, n_columns = values.shape
    values = np.ascontiguousarray(values)
    importances = np.ones(n_columns, dtype=np.float32)  # some types can't do without
    data = np.empty(n_rows * row_bytes(type_id, n_columns), dtype=np.uint8)
    _call(
        "ggml_quantize_chunk", type_id, values.ctypes.data, data.ctypes.data, 0, n_rows, n_columns,
        importances.ctypes.data,
    )  # fmt: skip
    return data


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a graph; data is its memory, for the caller to write."""

    pointer: int
    shape: tuple[int, ...]
    """As ggml's, the row first."""
    data: Bytes


class Graph:
    """Matrix products that the CPU computes one after the other, as in a model's graph.

    All tensors lie in memory of the caller, which is left as it is where nothing is written: a
    weight consists of what was there before.
    """

    def __init__(self, memory: Bytes, n_threads: int) -> None:
        """Begin an empty graph over memory, of one dimension, aligned to 64 bytes."""
        self._memory, self._n_used = memory, 0
        self._context = _call("ggml_init", _InitParams(self._overhead_bytes(), None, True))
        self._graph = _call("ggml_new_graph", self._context)
        self._buffer = _call("ggml_backend_cpu_buffer_from_ptr", memory.ctypes.data, memory.nbytes)
        self._backend = _call("ggml_backend_cpu_init")
        _call("ggml_backend_cpu_set_n_threads", self._backend, n_threads)

    @staticmethod
    def _overhead_bytes() -> int:
        tensor_bytes = _call("ggml_tensor_overhead")
        return int(_call("ggml_graph_overhead") + _MAX_TENSORS * tensor_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes of the memory that no tensor has taken."""
        return self._memory.nbytes - self._n_used

    def tensor(self, type_id: int, *shape: int) -> Operand:
        """Take the next piece of memory for a tensor."""
        sizes = (c_int64 * len(shape))(*shape)
        pointer = _call("ggml_new_tensor", self._context, type_id, len(shape), sizes)
        n_bytes = prod(shape[1:]) * row_bytes(type_id, shape[0])
        return Operand(pointer, shape, self._place(pointer, n_bytes))

    def mul_mat(self, weight: Operand, tokens: Operand) -> Bytes:
        """Add the product of weight (k, m) and tokens (k, n); return where it will be."""
        result = _call("ggml_mul_mat", self._context, weight.pointer, tokens.pointer)
        return self._add(result, weight.shape[1] * tokens.shape[1])

    def mul_mat_id(self, experts: Operand, tokens: Operand, ids: Operand) -> Bytes:
        """Add the products of tokens (k, 1, n) and those of experts (k, m, e) in ids (u, n)."""
        pointers = (operand.pointer for operand in (experts, tokens, ids))
        result = _call("ggml_mul_mat_id", self._context, *pointers)
        return self._add(result, experts.shape[1] * prod(ids.shape))

    def compute(self) -> None:
        """Compute all products once."""
        status = _call("ggml_backend_graph_compute", self._backend, self._graph)
        if status != 0:
            raise EngineError(f"ggml could not compute matrix products: status {status}")

    def close(self) -> None:
        """Free all but the memory, which is the caller's."""
        _call("ggml_backend_free", self._backend)
        _call("ggml_backend_buffer_free", self._buffer)
        _call("ggml_free", self._context)

    def _add(self, result: int, n_values: int) -> Bytes:
        _call("ggml_build_forward_expand", self._graph, result)
        return self._place(result, 4 * n_values)

    def _place(self, pointer: int, n_bytes: int) -> Bytes:
        data = self._memory[self._n_used : self._n_used + n_bytes]
        assert data.nbytes == n_bytes, "the memory holds all tensors"
        self._n_used += -(-n_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        status = _call("ggml_backend_tensor_alloc", self._buffer, pointer, data.ctypes.data)
        assert status == 0, "memory that is there needs no allocation"
        return data
