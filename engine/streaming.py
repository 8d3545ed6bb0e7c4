"""Weights that are read while they are used: from a plan to what llama.cpp is given.

In: a model's header, its tensor table and a WeightsPlan. Out: a WeightStream, which llama.Model
loads from and contexts call back into. Knows the C stream and GGUF's layout, and no llama.cpp.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from headrace.engine.errors import ModelUnusable, WeightsUnreadable
from headrace.engine.gguf import Header, Tensor
from headrace.engine.plan import WeightsPlan
from headrace.engine.routing import ExpertUsage
from headrace.engine.tensors import name_patterns
from headrace.engine.weights import Stream, StreamStats, open_direct

logger = logging.getLogger(__name__)

# Experts that are read at once when there is time: few, as a request may come meanwhile.
N_FILL = 8

_MEMORY, _FILE, _STREAMED = range(3)  # native/vfile.h, enum vfile_kind
_REASONS = {
    errno.ENODATA: "the file ends within them",
    errno.ESTALE: "the file was changed after it was loaded",
    errno.ENOSPC: "the step needs more expert records than there are",
}

Counts = npt.NDArray[np.int64]
Functions = tuple[int, int, int, int, int]
Extent = tuple[int, int, int, int, int]
Fault = tuple[int, bytes | None, int, int, str, str]


class WeightStream:
    """The weights of one model on their way to llama.cpp; owns files, threads and buffers."""

    def __init__(
        self, header: Header, plan: WeightsPlan, functions: Functions, *,
        n_threads: int = 0, direct: bool = True, policy: int = 3, lookahead: int = 1,
    ) -> None:  # fmt: skip
        """Open the files of a model; functions are addresses as native.Stream wants them.

        n_threads read at once; 0: as many as planned.

        Raises:
            ModelUnusable: a file can't be opened or changed since its header was read, or
                llama.cpp is not the version that streaming is made for.
        """
        self._path = header.path
        self._blocks = [block for blocks in plan.expert_blocks for block in blocks]
        self._pool_records = self._planned_records = plan.pool_records
        # A batch may use all experts of a block; where fewer were planned it is as short as that.
        self._least_records = tuple(
            min(n, blocks[0].n_experts)
            for n, blocks in zip(plan.pool_records, plan.expert_blocks, strict=True)
        )
        self._planned_bytes = 0
        self._to_fill: list[int] = []
        self._n_hits = self._n_misses = 0
        self.patterns = name_patterns(plan.streamed)
        """Regular expressions for the names of the streamed tensors."""
        paths = tuple(os.fsencode(file.path) for file in header.files)
        try:
            head, extents = _extents(header, plan)
            self.native = Stream(
                functions, paths, head, extents, tuple(_weights(plan)), plan.pool_records,
                plan.n_ring_slots, n_threads or plan.n_io_threads, direct, policy, lookahead,
            )  # fmt: skip
        except OSError as error:
            path = header.path if error.filename is None else os.fsdecode(error.filename)
            if error.errno == errno.ENOTSUP:
                reason = "can't stream to this llama.cpp, expected llama-cpp-python 0.3.36"
            else:
                reason = f"can't be opened for streaming: {str(error.strerror).lower()}"
            raise ModelUnusable(f"{path}: {reason}") from error
        if not all(file.is_current() for file in header.files):
            self.close()
            raise ModelUnusable(f"{header.path}: was replaced while it was opened")
        if direct and not self.native.is_direct:
            logger.warning(
                "%s: its file system refuses direct reads, reading through it", header.path
            )

    def start(self) -> None:
        """Take the memory for streaming; after the model was loaded.

        Raises:
            ModelUnusable: there is not enough, or llama.cpp placed a tensor elsewhere.
        """
        try:
            self.native.start()
        except OSError as error:
            if error.errno == errno.EINVAL:
                reason = "llama.cpp does not use all weights that were to be streamed"
            else:
                reason = f"no memory to stream weights: {str(error.strerror).lower()}"
            raise ModelUnusable(f"{self._path}: {reason}") from error
        self._planned_bytes = self.native.stats().resident_bytes if self._blocks else 0

    def load_error(self) -> str | None:
        """Return why loading failed, if a read did."""
        fault = self.native.load_fault()
        return None if fault is None else _reason(fault)

    def finish(self) -> WeightsUnreadable | None:
        """End a step, and return the error that makes its results worthless, if any."""
        fault = self.native.finish()
        return None if fault is None else WeightsUnreadable(_reason(fault))

    def expect(self, usage: ExpertUsage) -> None:
        """Let fill read the experts that were used most, as many as there are records."""
        in_order = sorted(range(len(self._blocks)), key=lambda i: self._blocks[i].block)
        counts: list[Counts] = [np.zeros(0, dtype=np.int64)] * len(self._blocks)
        for place, block_counts in zip(in_order, usage.counts, strict=True):
            counts[place] = block_counts
        flat = np.concatenate(counts)
        best = np.argsort(-flat, kind="stable")[: sum(self._pool_records)]
        self._to_fill = [int(i) for i in best[::-1] if flat[i] > 0]

    def fill(self) -> bool:
        """Read some of what is expected into records that are free; False if nothing is left.

        Takes some milliseconds: for when there is nothing else to do.
        """
        if not self._to_fill:
            return False
        chunk = tuple(self._to_fill[-N_FILL:][::-1])
        del self._to_fill[-N_FILL:]
        if not self.native.fill(chunk):
            self._to_fill.clear()
        return bool(self._to_fill)

    @property
    def planned_bytes(self) -> int:
        """The memory of all records that were planned; after start."""
        return self._planned_bytes

    @property
    def least_share(self) -> float:
        """The part of the planned records below which a batch may not find room; 1: no records."""
        shares = zip(self._least_records, self._planned_records, strict=True)
        return max((least / n for least, n in shares), default=1.0)

    def resize(self, share: float) -> None:
        """Use a share of the planned records from now on; between steps.

        Raises:
            MemoryError: there is no memory for so many; as many as before are used.
        """
        records = tuple(
            max(least, min(n, round(share * n)))
            for least, n in zip(self._least_records, self._planned_records, strict=True)
        )
        for pool, n in enumerate(records):
            try:
                self.native.resize(pool, n)
            except OSError as error:
                raise MemoryError(f"{n} expert records: {error.strerror}") from error
        self._pool_records = records

    def learn(self, before: StreamStats) -> None:
        """Note a step of decode tokens, which began with the counters before."""
        now = self.native.stats()
        # A useful guess is a hit that without it would have been none.
        n_useful = now.n_useful - before.n_useful
        self._n_hits += now.n_hits - before.n_hits - n_useful
        self._n_misses += now.n_misses - before.n_misses + n_useful

    def usage(self) -> ExpertUsage | None:
        """Return how often each expert was chosen since the files were opened; None if never."""
        uses = np.frombuffer(self.native.uses(), dtype=np.uint32).astype(np.int64)
        n_chosen = self._n_hits + self._n_misses
        if not n_chosen:
            return None
        lengths = [block.n_experts for block in self._blocks]
        counts = np.split(uses, np.cumsum(lengths)[:-1])
        in_order = sorted(range(len(lengths)), key=lambda i: self._blocks[i].block)
        return ExpertUsage(
            tuple(counts[i] for i in in_order), sum(self._pool_records) / sum(lengths),
            self._n_hits / n_chosen,
        )  # fmt: skip

    def stats(self) -> StreamStats:
        """Return the counters since the files were opened."""
        return self.native.stats()

    def describe_since(self, before: StreamStats) -> str:
        """Return what happened since before, a former stats(), as words for a log line."""
        now = self.native.stats()
        n_read = now.bytes_read - before.bytes_read
        busy_ns = max(now.busy_ns - before.busy_ns, 1)
        parts = [
            f"read_mb={n_read / 1e6:.1f}",
            f"read_mb_per_s={n_read / busy_ns * 1e3:.0f}",
            f"read_s={busy_ns / 1e9:.2f}",
            f"stall_s={(now.stall_ns - before.stall_ns) / 1e9:.2f}",
        ]
        names = (
            "n_hits", "n_misses", "n_evictions", "n_guesses", "n_useful", "n_late", "n_ahead",
            "n_demand",
        )  # fmt: skip
        deltas = ((name, getattr(now, name) - getattr(before, name)) for name in names)
        parts += [f"{name}={n}" for name, n in deltas if n]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return " ".join([*parts, f"stream_mb={now.resident_bytes / 1e6:.0f}", f"majflt={faults}"])

    def close(self) -> None:
        """Free everything; contexts and model must be closed before."""
        self.native.close()


def _reason(fault: Fault) -> str:
    error, path, offset, length, node, weight = fault
    if path is None and error == errno.ENOTSUP:
        what = f"weight {weight!r}" if weight else "a streamed weight"
        return f"{what} is used by {node!r} in a way that streaming does not know"
    reason = _REASONS.get(error, os.strerror(error).lower())
    if path is None:
        return f"weights for {node!r}: {reason}"
    of = f" of {weight}" if weight else ""
    return f"{os.fsdecode(path)}: reading {length} bytes at offset {offset}{of}: {reason}"


def _weights(plan: WeightsPlan) -> Iterator[tuple[bytes, int, int, int, int, int, int]]:
    """Yield the streamed tensors as native.Stream wants them."""
    for pool, blocks in enumerate(plan.expert_blocks):
        for block in blocks:
            for part in block.parts:
                yield (*_place(part), block.block, block.n_experts, pool)
    if not plan.expert_blocks:
        for tensor in plan.streamed:
            yield (*_place(tensor), -1, 0, 0)


def _place(tensor: Tensor) -> tuple[bytes, int, int, int]:
    return tensor.name.encode(), tensor.file_index, tensor.offset_bytes, tensor.n_bytes


def _extents(header: Header, plan: WeightsPlan) -> tuple[bytes, tuple[Extent, ...]]:
    """Return the header of the file that llama.cpp is to read, and what lies where in that file."""
    head, places = _virtual_header(header)
    streamed = {tensor.name for tensor in plan.streamed}
    extents = [(0, len(head), _MEMORY, 0, 0)]
    for tensor, start in places:
        kind = _STREAMED if tensor.name in streamed else _FILE
        extents.append((start, tensor.n_bytes, kind, tensor.file_index, tensor.offset_bytes))
    return head, tuple(extents)


def _virtual_header(header: Header) -> tuple[bytes, list[tuple[Tensor, int]]]:
    """Return the header of one file with all tensors, and where each is in that file.

    Of a single file it is the file's own; of a split model the first one's metadata with a tensor
    table of all parts.
    """
    if len(header.files) == 1:
        with open_direct(header.path) as file:
            head = file.read(header.data_offset)
        return head, [(tensor, tensor.offset_bytes) for tensor in header.tensors]
    with open_direct(header.path) as file:
        metadata = file.read(header.table_offset)[24:]
    n_keys = len(header.metadata)
    made = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(header.tensors), n_keys) + metadata)
    offset, offsets = 0, []
    for tensor in header.tensors:
        name = tensor.name.encode()
        made += struct.pack(f"<Q{len(name)}sI", len(name), name, len(tensor.shape))
        made += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type_id, offset)
        offsets.append(offset)
        offset += _padded(tensor.n_bytes, header.alignment)
    made += bytes(_padded(len(made), header.alignment) - len(made))
    places = [(t, len(made) + o) for t, o in zip(header.tensors, offsets, strict=True)]
    return bytes(made), places


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment
