"""Functions of ggml that llama-cpp-python does not declare: its backends, and single products.

In: shapes, types by number, values. Out: computed graphs, lists of backends and of GPUs. The
library is the one that llama.py loaded. Knows no model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine import llama
from headrace.engine.errors import EngineError
from headrace.engine.profile import CPU

Bytes = npt.NDArray[np.uint8]

# enum ggml_type
F32, F16, I32 = 0, 1, 26
# enum ggml_backend_dev_type: the last two with memory of their own, and sharing the machine's.
_CPU, _GPU, _INTEGRATED_GPU = 0, 1, 2
_MAX_TENSORS = 512


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


# Name → result and arguments: ggml.h, ggml-backend.h, ggml-cpu.h.
_DECLARATIONS: dict[str, tuple[Any, ...]] = {
    "ggml_init": (c_void_p, _InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead": (c_size_t,),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_nbytes": (c_size_t, c_void_p),
    "ggml_quantize_chunk": (c_size_t, c_int, *[c_void_p] * 2, *[c_int64] * 3, c_void_p),
    "ggml_new_tensor": (c_void_p, c_void_p, c_int, c_int, ctypes.POINTER(c_int64)),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_mul_mat_id": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_flash_attn_ext": (c_void_p, *[c_void_p] * 5, *[c_float] * 3),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_free": (None, c_void_p),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_buft_alloc_buffer": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_buffer_get_base": (c_void_p, c_void_p),
    "ggml_backend_buffer_get_size": (c_size_t, c_void_p),
    "ggml_backend_buffer_get_alignment": (c_size_t, c_void_p),
    "ggml_backend_buffer_get_alloc_size": (c_size_t, c_void_p, c_void_p),
    "ggml_backend_tensor_alloc": (c_int, c_void_p, c_void_p, c_void_p),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_dev_count": (c_size_t,),
    "ggml_backend_dev_get": (c_void_p, c_size_t),
    "ggml_backend_dev_init": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_dev_type": (c_int, c_void_p),
    "ggml_backend_dev_name": (c_char_p, c_void_p),
    "ggml_backend_dev_description": (c_char_p, c_void_p),
    "ggml_backend_dev_memory": (None, c_void_p, *[ctypes.POINTER(c_size_t)] * 2),
    "ggml_backend_dev_buffer_type": (c_void_p, c_void_p),
    "ggml_backend_dev_backend_reg": (c_void_p, c_void_p),
    "ggml_backend_dev_supports_op": (c_bool, c_void_p, c_void_p),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
}


def _call(name: str, *arguments: Any) -> Any:
    """Call a function of ggml; like all ctypes calls without the GIL."""
    function = getattr(llama.library(), name)
    function.restype, *function.argtypes = _DECLARATIONS[name]
    return function(*arguments)


@dataclass(frozen=True, slots=True)
class Backend:
    """A device that computes, and the memory that weights are in for it."""

    name: str
    """Of the device, or of memory in which the CPU keeps weights in an order of its own."""
    description: str
    device: int
    buffer_type: int
    is_gpu: bool
    is_integrated: bool = False
    """Whether it is a GPU that shares the machine's memory."""

    def memory_bytes(self) -> tuple[int, int]:
        """Return free and total bytes of the device's memory now."""
        free, total = c_size_t(), c_size_t()
        _call("ggml_backend_dev_memory", self.device, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def list_backends() -> tuple[Backend, ...]:
    """Return all that this build of ggml can multiply with: the CPU first, GPUs last."""
    cpus, gpus = list[Backend](), list[Backend]()
    for i in range(_call("ggml_backend_dev_count")):
        device = _call("ggml_backend_dev_get", i)
        kind = _call("ggml_backend_dev_type", device)
        name = _text("ggml_backend_dev_name", device)
        about = _text("ggml_backend_dev_description", device)
        memory = _call("ggml_backend_dev_buffer_type", device)
        if kind == _CPU:
            cpus.append(Backend(CPU, about, device, memory, is_gpu=False))
            cpus += (
                Backend(_text("ggml_backend_buft_name", other), about, device, other, is_gpu=False)
                for other in _extra_buffer_types(device)
            )
        elif kind in (_GPU, _INTEGRATED_GPU):
            gpus.append(Backend(name, about, device, memory, True, kind == _INTEGRATED_GPU))
    return (*cpus, *gpus)


def find_gpu(name: str) -> Backend | None:
    """Return the GPU of that name; None if this build of ggml or this machine has none."""
    return next((found for found in list_backends() if found.is_gpu and found.name == name), None)


def _extra_buffer_types(device: int) -> Iterator[int]:
    """Yield the memories in which a device keeps weights in another order than files have."""
    registry = _call("ggml_backend_dev_backend_reg", device)
    address = _call(
        "ggml_backend_reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts"
    )
    if address is None:
        return
    get = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)
    yield from takewhile(lambda pointer: pointer is not None, iter(get(device)))


def _text(name: str, pointer: int) -> str:
    text: bytes = _call(name, pointer)
    return text.decode(errors="replace")


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
    """A tensor of a graph."""

    pointer: int
    shape: tuple[int, ...]
    """As ggml's, the row first."""

    @property
    def n_bytes(self) -> int:
        """Bytes of its values, as a file has them."""
        return int(_call("ggml_nbytes", self.pointer))

    def write(self, values: npt.NDArray[Any]) -> None:
        """Set all values; those of a weight may be stored in another order."""
        values = np.ascontiguousarray(values)
        assert values.nbytes == self.n_bytes, "values fill the tensor"
        _call("ggml_backend_tensor_set", self.pointer, values.ctypes.data, 0, values.nbytes)

    def read(self) -> npt.NDArray[np.float32]:
        """Return the values of a result, in one dimension."""
        values = np.empty(self.n_bytes // 4, dtype=np.float32)
        _call("ggml_backend_tensor_get", self.pointer, values.ctypes.data, 0, values.nbytes)
        return values


class _Memory:
    """A buffer whose pieces are taken one after the other."""

    def __init__(self, buffer: int | None, n_bytes: int) -> None:
        if buffer is None:
            raise EngineError(f"ggml can't allocate {n_bytes} bytes to measure with")
        self._buffer = buffer
        self._next: int = _call("ggml_backend_buffer_get_base", buffer)
        self._end: int = self._next + _call("ggml_backend_buffer_get_size", buffer)
        self._alignment: int = _call("ggml_backend_buffer_get_alignment", buffer)

    @property
    def free_bytes(self) -> int:
        return self._end - self._next

    def place(self, tensor: int) -> None:
        n_bytes = _call("ggml_backend_buffer_get_alloc_size", self._buffer, tensor)
        assert n_bytes <= self.free_bytes, "the memory holds all tensors"
        status = _call("ggml_backend_tensor_alloc", self._buffer, tensor, self._next)
        assert status == 0, "memory that is there needs no allocation"
        self._next += -(-n_bytes // self._alignment) * self._alignment

    def close(self) -> None:
        _call("ggml_backend_buffer_free", self._buffer)


class Graph:
    """Matrix products that a backend computes one after the other, as in a model's graph."""

    def __init__(
        self, backend: Backend, *, n_threads: int, weights: Bytes | int, n_other_bytes: int
    ) -> None:  # fmt: skip
        """Begin an empty graph, with n_other_bytes for all but weights; n_threads is for a CPU.

        weights is the memory for weights, of one dimension and aligned to 64 bytes, which the
        caller keeps; or how many bytes of the backend's own memory to take.

        Raises:
            EngineError: so much memory can't be had.
        """
        self._device = backend.device
        self._context = _call("ggml_init", _InitParams(self._overhead_bytes(), None, True))
        self._graph = _call("ggml_new_graph", self._context)
        self._backend = _call("ggml_backend_dev_init", backend.device, None)
        self._memories: list[_Memory] = []
        try:
            if not self._backend:
                raise EngineError(f"ggml can't start {backend.name}: {backend.description}")
            if not backend.is_gpu:
                _call("ggml_backend_cpu_set_n_threads", self._backend, n_threads)
            others = _call("ggml_backend_dev_buffer_type", backend.device)
            self._add_memory(backend.buffer_type, weights)
            self._add_memory(others, n_other_bytes)
        except EngineError:
            self.close()
            raise
        self._weights, self._others = self._memories

    @staticmethod
    def _overhead_bytes() -> int:
        tensor_bytes = _call("ggml_tensor_overhead")
        return int(_call("ggml_graph_overhead") + _MAX_TENSORS * tensor_bytes)

    def _add_memory(self, buffer_type: int, memory: Bytes | int) -> None:
        if isinstance(memory, int):
            buffer = _call("ggml_backend_buft_alloc_buffer", buffer_type, memory)
            self._memories.append(_Memory(buffer, memory))
        else:
            start, n_bytes = memory.ctypes.data, memory.nbytes
            buffer = _call("ggml_backend_cpu_buffer_from_ptr", start, n_bytes)
            self._memories.append(_Memory(buffer, n_bytes))

    @property
    def free_bytes(self) -> int:
        """Bytes for weights that none has taken."""
        return self._weights.free_bytes

    def weight(self, type_id: int, *shape: int) -> Operand:
        """Take the next piece of the memory for weights."""
        return self._tensor(self._weights, type_id, shape)

    def tensor(self, type_id: int, *shape: int) -> Operand:
        """Take the next piece of the other memory."""
        return self._tensor(self._others, type_id, shape)

    def mul_mat(self, weight: Operand, tokens: Operand) -> Operand:
        """Add the product of weight (k, m) and tokens (k, n); return what it will be."""
        result = _call("ggml_mul_mat", self._context, weight.pointer, tokens.pointer)
        return self._add(result, weight.shape[1], tokens.shape[1])

    def mul_mat_id(self, experts: Operand, tokens: Operand, ids: Operand) -> Operand:
        """Add the products of tokens (k, 1, n) and those of experts (k, m, e) in ids (u, n)."""
        pointers = (operand.pointer for operand in (experts, tokens, ids))
        result = _call("ggml_mul_mat_id", self._context, *pointers)
        return self._add(result, experts.shape[1], *ids.shape)

    def attend(self, queries: Operand, keys: Operand, values: Operand, mask: Operand) -> Operand:
        """Add the attention of queries (d, n, h) to keys and values (d, m, g), with mask (m, n)."""
        pointers = (operand.pointer for operand in (queries, keys, values, mask))
        scale = queries.shape[0] ** -0.5
        result = _call("ggml_flash_attn_ext", self._context, *pointers, scale, 0.0, 0.0)
        d, n_tokens, n_heads = queries.shape
        return self._add(result, d, n_heads, n_tokens)

    def supports(self, result: Operand) -> bool:
        """Tell whether the backend can compute that product, of weights where they are."""
        return bool(_call("ggml_backend_dev_supports_op", self._device, result.pointer))

    def compute(self) -> None:
        """Compute all products once.

        Raises:
            EngineError: the backend can't.
        """
        status = _call("ggml_backend_graph_compute", self._backend, self._graph)
        if status != 0:
            raise EngineError(f"ggml computes no product, status {status}")

    def close(self) -> None:
        """Free all but memory of the caller."""
        for memory in self._memories:
            memory.close()
        if self._backend:
            _call("ggml_backend_free", self._backend)
        _call("ggml_free", self._context)

    def _tensor(self, memory: _Memory, type_id: int, shape: tuple[int, ...]) -> Operand:
        sizes = (c_int64 * len(shape))(*shape)
        pointer = _call("ggml_new_tensor", self._context, type_id, len(shape), sizes)
        memory.place(pointer)
        return Operand(pointer, shape)

    def _add(self, result: int, *shape: int) -> Operand:
        _call("ggml_build_forward_expand", self._graph, result)
        self._others.place(result)
        return Operand(result, shape)
