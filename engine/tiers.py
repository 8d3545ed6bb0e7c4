"""The fastest way to divide a model's weights among VRAM, memory and disk.

In: a model's tensors, what they cost where they are, and how much memory there is. Out: a Choice.
Pure arithmetic over all divisions at once; knows neither headers nor settings.

Weights of one type and size are alike, so a division is a number of each class in each place. All
numbers are tried, but for one class of each place, which gets all that fits: that never hurts.
Where there would be too many, the numbers are even shares of all classes. What is tried depends on
no budget, so with a larger one there is nothing to lose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine.gguf import Tensor
from headrace.engine.messages import Mode
from headrace.engine.pass_time import (
    BLOCK_S,
    EMBEDDING,
    HIDDEN_DENSE,
    HIDDEN_MISSES,
    HOP_S,
    CostModel,
    Place,
    is_matrix,
    overlapped,
)
from headrace.engine.tensors import BLOCK, ExpertBlock, TensorTable, is_beside_experts

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Divisions that are tried: between VRAM and the rest, and in all; and of one place at least.
_MAX_ROWS, _MAX_TRIED, _LEAST_TRIED = 4096, 200_000, 16
# Divisions that differ by less than this in time are as fast: floats are added in some order.
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class UnitClass:
    """Weights that are alike, each of which is in one place as a whole.

    A dense tensor, or all experts of a block.
    """

    blocks: tuple[int, ...]
    """Of each unit, in the order of use."""
    units: tuple[tuple[Tensor, ...], ...]
    experts: ExpertBlock | None
    """One of the blocks, if these are experts."""
    share: float
    """What a token uses of a unit."""

    @property
    def n_units(self) -> int:
        return len(self.units)

    @property
    def n_bytes(self) -> int:
        """Of one unit."""
        return sum(tensor.n_bytes for tensor in self.units[0])

    def seconds(self, cost: CostModel | None, place: Place) -> float:
        """Return what one token takes for a unit at place; without cost nothing takes time."""
        if cost is None:
            return 0.0
        return sum(cost.product_s(tensor, self.share, place) for tensor in self.units[0])


def classify(table: TensorTable) -> tuple[UnitClass, ...]:
    """Return the classes of table's weights: the dense ones, then the experts by pool."""
    dense: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
    for item in table.dense:
        key = item.tensor.type_id, item.tensor.n_bytes
        dense.setdefault(key, []).append((item.block, item.tensor))
    classes = [
        UnitClass(tuple(b for b, _ in found), tuple((t,) for _, t in found), None, 1.0)
        for found in dense.values()
    ]
    for pool in table.pools:
        blocks, units = tuple(b.block for b in pool), tuple(b.parts for b in pool)
        share = min(table.n_used / pool[0].n_experts, 1.0)
        classes.append(UnitClass(blocks, units, pool[0], share))
    return tuple(classes)


@dataclass(frozen=True, slots=True)
class Layers:
    """What the trunk takes, and the cells, by the number of layers on the GPU: (n,) each."""

    n_gpu_layers: Ints
    ram_bytes: Ints
    vram_bytes: Ints
    kv_ram_bytes: Ints
    kv_vram_bytes: Ints
    seconds: Floats
    lent_s: Floats
    """What more it takes where the GPU may take weights from memory."""

    def without_gpu(self) -> Layers:
        """Return what there is with no layer on the GPU."""
        return Layers(
            self.n_gpu_layers[:1], self.ram_bytes[:1], self.vram_bytes[:1], self.kv_ram_bytes[:1],
            self.kv_vram_bytes[:1], self.seconds[:1], self.lent_s[:1],
        )  # fmt: skip


def trunk_layers(table: TensorTable, cost: CostModel | None, has_gpu: bool) -> Layers:
    """Return what the trunk takes with so many layers on the GPU, without cells."""
    n = table.n_blocks + 2 if has_gpu else 1
    ram, vram = np.zeros(n, np.int64), np.zeros(n, np.int64)
    seconds, lent_s = np.zeros(n), np.zeros(n)
    for tensor in table.trunk:
        first = fewest_layers(tensor, table)
        is_product = cost is not None and is_matrix(tensor, table)
        ram[:first] += tensor.n_bytes
        vram[first:] += tensor.n_bytes
        if cost is not None and is_product:
            in_ram_s = cost.product_s(tensor, 1.0, "ram")
            seconds[:first] += in_ram_s
            lent_s[1:first] += cost.product_s(tensor, 1.0, "lent") - in_ram_s
            if first < n:
                seconds[first:] += cost.product_s(tensor, 1.0, "vram")
        # Rows of an embedding are picked by the CPU, and a tied one is the GPU's output, too. What
        # is beside experts goes with them, wherever that is.
        if tensor.name == EMBEDDING or is_beside_experts(tensor):
            ram[first:] += tensor.n_bytes
    if cost is not None:
        seconds += table.n_blocks * BLOCK_S + np.array([cost.context_s(g) for g in range(n)])
    zeros = np.zeros(n, np.int64)
    return Layers(np.arange(n), ram, vram, zeros, zeros, seconds, lent_s)


def fewest_layers(tensor: Tensor, table: TensorTable) -> int:
    """Return from how many layers on the GPU on llama.cpp puts a tensor there.

    Source: llama-model.cpp, load_tensors: the output counts as the last layer, and goes first.
    """
    if match := BLOCK.match(tensor.name):
        return table.n_blocks + 1 - int(match[1])
    return 1 if is_matrix(tensor, table) else table.n_blocks + 2


@dataclass(frozen=True, slots=True)
class Choice:
    """How many units of each class are where; the others are streamed."""

    mode: Mode
    seconds: float
    read_s: float
    ram_bytes: int
    """What it needs, for weights, cells and streaming."""
    n_gpu_layers: int
    in_vram: tuple[int, ...]
    in_ram: tuple[int, ...]
    n_ring_slots: int = 0
    pool_records: tuple[int, ...] = ()
    """Of each class of experts; 0: none of it is streamed."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Divisions between VRAM and the rest: (n,), and (n, n_classes) in VRAM."""

    layers: Ints
    in_vram: Ints
    others: Ints
    """(n, n_classes) not in VRAM."""
    ram_bytes: Ints
    """Of trunk and cells."""
    seconds: Floats
    """Of trunk, what is in VRAM, and the ways there."""
    lent_s: Floats
    """What more the trunk takes where the GPU may take weights from memory."""


def vram_rows(
    classes: Sequence[UnitClass], layers: Layers, cost: CostModel | None, vram_bytes: int
) -> Rows:
    """Return all ways to use VRAM that fit."""
    n_units = np.array([c.n_units for c in classes], np.int64)
    # (n_layers, n_classes): the units that are on the GPU's layers.
    n_blocks = len(layers.n_gpu_layers) - 2
    on_gpu = np.array([
        [sum(block >= n_blocks + 1 - g for block in c.blocks) if g else 0 for c in classes]
        for g in layers.n_gpu_layers.tolist()
    ], np.int64).reshape(-1, len(classes))  # fmt: skip
    vram_s = np.array([c.seconds(cost, "vram") for c in classes])
    gains = [c.seconds(cost, "stream") >= s and c.seconds(cost, "ram") >= s
             for c, s in zip(classes, vram_s, strict=True)]  # fmt: skip
    grid, filled = _grid(
        classes,
        n_units if on_gpu.any() else 0 * n_units,
        gains,
        max(_MAX_ROWS // len(on_gpu), _LEAST_TRIED),
    )
    g = np.repeat(np.arange(len(layers.n_gpu_layers)), len(grid))
    in_vram = np.minimum(np.tile(grid, (len(layers.n_gpu_layers), 1)), on_gpu[g])
    sizes = np.array([c.n_bytes for c in classes], np.int64)
    left = vram_bytes - layers.vram_bytes[g] - layers.kv_vram_bytes[g] - in_vram @ sizes
    if filled is not None:
        more = np.clip(left // sizes[filled], 0, on_gpu[g, filled])
        in_vram[:, filled] = more
        left -= more * sizes[filled]
    fits = (left >= 0) | (g == 0)
    g, in_vram = g[fits], in_vram[fits]
    seconds = layers.seconds[g] + in_vram @ vram_s
    if cost is not None:
        seconds = seconds + HOP_S * (on_gpu[g] - in_vram).sum(axis=1)
    ram_bytes = layers.ram_bytes[g] + layers.kv_ram_bytes[g]
    return Rows(g, in_vram, n_units - in_vram, ram_bytes, seconds, layers.lent_s[g])


def _grid(
    classes: Sequence[UnitClass], n_units: Ints, gains: Sequence[bool], limit: int
) -> tuple[Ints, int | None]:
    """Return numbers of each class to try, and the class of which as many are taken as fit.

    That is the largest one whose units gain by it; its numbers are 0.
    """
    able = [i for i, gain in enumerate(gains) if gain]
    filled = max(able, key=lambda i: classes[i].n_units, default=None)
    counts = [0 if i == filled else int(n) for i, n in enumerate(n_units)]
    if math.prod(n + 1 for n in counts) <= limit:
        every = list(itertools.product(*(range(n + 1) for n in counts)))
        return np.array(every, np.int64).reshape(len(every), len(counts)), filled
    shares = np.linspace(0, 1, limit)[:, np.newaxis]
    return np.unique((shares * counts).astype(np.int64), axis=0), filled


def choose_resident(classes: Sequence[UnitClass], rows: Rows, cost: CostModel | None) -> Tried:
    """Return the divisions in which nothing is streamed."""
    ram_bytes = rows.ram_bytes + rows.others @ np.array([c.n_bytes for c in classes], np.int64)
    ram_s = rows.others @ np.array([c.seconds(cost, "ram") for c in classes])
    lent_s = rows.others @ np.array([c.seconds(cost, "lent") for c in classes]) + rows.lent_s
    seconds = rows.seconds + np.where(rows.layers > 0, lent_s, ram_s)

    def choice(i: int) -> Choice:
        return Choice(
            "full-resident", float(seconds[i]), 0.0, int(ram_bytes[i]), int(rows.layers[i]),
            _numbers(rows.in_vram[i]), _numbers(rows.others[i]),
        )  # fmt: skip

    return Tried(seconds, np.zeros(len(seconds)), ram_bytes, choice)


@dataclass(frozen=True, slots=True)
class Tried:
    """Divisions of one mode, (n,) each, and how to name one."""

    seconds: Floats
    read_s: Floats
    ram_bytes: Ints
    choice: Callable[[int], Choice]

    def best(self, ram_bytes: int) -> Choice | None:
        """Return the fastest that fits, of equals the one that reads least; None: none fits."""
        fits = self.ram_bytes <= ram_bytes
        if not fits.any():
            return None
        seconds = np.where(fits, self.seconds, np.inf)
        is_fast = seconds <= seconds.min() * (1 + _SAME)
        return self.choice(int(np.where(is_fast, self.read_s, np.inf).argmin()))

    def least(self) -> Choice:
        """Return the one that needs least memory, whether that is there or not."""
        return self.choice(int(self.ram_bytes.argmin()))


@dataclass(frozen=True, slots=True)
class Ring:
    """Slots for dense weights on their way: bytes of one, and how many there should be."""

    slot_bytes: int
    n_slots: int
    n_least: int
    extra_bytes: int


def choose_dense(
    classes: Sequence[UnitClass], rows: Rows, cost: CostModel | None, ring: Ring,
    ram_bytes: int, disk_bytes_per_s: float,
) -> Tried:  # fmt: skip
    """Return the divisions in which dense weights are streamed through ring, experts none.

    Memory goes to the ring first: as long as that is smaller than it should be nothing is pinned.
    """
    sizes = np.array([c.n_bytes for c in classes], np.int64)
    is_dense = np.array([c.experts is None for c in classes])
    ram_s = np.array([c.seconds(cost, "ram") for c in classes])
    stream_s = np.array([c.seconds(cost, "stream") for c in classes])
    kept = rows.ram_bytes + rows.others @ np.where(is_dense, 0, sizes)
    slots = (ram_bytes - kept - ring.extra_bytes) // ring.slot_bytes
    slots = np.clip(slots, ring.n_least, ring.n_slots)
    kept = kept + slots * ring.slot_bytes + ring.extra_bytes
    n_units = np.where(is_dense, [c.n_units for c in classes], 0)
    gains = (is_dense & (stream_s >= ram_s)).tolist()
    grid, filled = _grid(classes, n_units, gains, max(_MAX_TRIED // len(rows.layers), _LEAST_TRIED))
    row = np.repeat(np.arange(len(rows.layers)), len(grid))
    could = np.where(is_dense, rows.others, 0)[row]
    pinned = np.minimum(np.tile(grid, (len(rows.layers), 1)), could)
    left = ram_bytes - kept[row] - pinned @ sizes
    if filled is not None:
        pinned[:, filled] = np.clip(left // sizes[filled], 0, could[:, filled])
    pinned[slots[row] < ring.n_slots] = 0
    streamed = could - pinned
    read_bytes = streamed @ sizes
    second = cost.dense_read_s(1.0) if cost else 1 / disk_bytes_per_s
    read_s = np.asarray(read_bytes * second, np.float64)
    compute_s = rows.seconds[row] + streamed @ stream_s + (rows.others[row] - streamed) @ ram_s
    seconds = overlapped(compute_s, read_s, HIDDEN_DENSE)
    needed = kept[row] + pinned @ sizes

    def choice(i: int) -> Choice:
        in_vram, others = rows.in_vram[row[i]], rows.others[row[i]]
        return Choice(
            "dense-ffn-streaming", float(seconds[i]), float(read_s[i]), int(needed[i]),
            int(rows.layers[row[i]]), _numbers(in_vram), _numbers(others - streamed[i]),
            n_ring_slots=int(slots[row[i]]),
        )  # fmt: skip

    return Tried(seconds, read_s, needed, choice)


@dataclass(frozen=True, slots=True)
class Records:
    """What records of a class of experts take: bytes of one, and of their pool beside them."""

    record_bytes: int
    extra_bytes: int
    n_used: int
    n_experts: int


def choose_experts(
    classes: Sequence[UnitClass], rows: Rows, cost: CostModel | None, records: Sequence[Records],
    ram_bytes: int,
) -> Tried:  # fmt: skip
    """Return the divisions in which experts are streamed through pools, and dense weights not.

    Each pool gets its share of the memory, at least what one token uses.
    """
    sizes = np.array([c.n_bytes for c in classes], np.int64)
    is_dense = np.array([c.experts is None for c in classes])
    kept = rows.ram_bytes + rows.others @ np.where(is_dense, sizes, 0)
    ram_s = np.array([c.seconds(cost, "ram") for c in classes])
    stream_s = np.array([c.seconds(cost, "stream") for c in classes])
    compute_s = rows.seconds + rows.others @ np.where(is_dense, ram_s, stream_s)
    streamed_bytes = rows.others @ np.where(is_dense, 0, sizes)
    read_s = np.zeros(len(kept))
    numbers = np.zeros((len(kept), len(records)), np.int64)
    least = np.zeros_like(numbers)
    pools = [i for i, c in enumerate(classes) if c.experts is not None]
    for pool, (i, record) in enumerate(zip(pools, records, strict=True)):
        n_blocks = rows.others[:, i]
        left = np.maximum(ram_bytes - kept, 0)
        part = n_blocks * sizes[i] / np.maximum(streamed_bytes, 1)
        # A byte less than the share of some: it was rounded.
        share = np.where(part == 1, left, (left * part).astype(np.int64) - 1)
        n = (share - record.extra_bytes) // record.record_bytes
        least[:, pool] = n_blocks * record.n_used
        numbers[:, pool] = np.clip(n, least[:, pool], n_blocks * record.n_experts)
    record_bytes = np.array([record.record_bytes for record in records], np.int64)
    extra_bytes = np.array([record.extra_bytes for record in records], np.int64)
    kept = kept + (least > 0) @ extra_bytes
    numbers = np.where((kept + numbers @ record_bytes > ram_bytes)[:, np.newaxis], least, numbers)
    needed = kept + numbers @ record_bytes
    if cost is not None:
        for pool, i in enumerate(pools):
            kind, n = classes[i], numbers[:, pool]
            read_s = read_s + _missed_s(cost, kind, pool, n, rows.others[:, i])
    # What is in VRAM as a whole is another mode.
    needed = np.where(streamed_bytes > 0, needed, np.iinfo(np.int64).max)
    seconds = overlapped(compute_s, read_s, HIDDEN_MISSES)

    def choice(i: int) -> Choice:
        return Choice(
            "expert-streaming", float(seconds[i]), float(read_s[i]), int(needed[i]),
            int(rows.layers[i]), _numbers(rows.in_vram[i]),
            _numbers(np.where(is_dense, rows.others[i], 0)), pool_records=_numbers(numbers[i]),
        )  # fmt: skip

    return Tried(seconds, read_s, needed, choice)


def _missed_s(cost: CostModel, kind: UnitClass, pool: int, n: Ints, n_blocks: Ints) -> Floats:
    """Return the seconds of reading what one token misses with n records for n_blocks blocks."""
    assert kind.experts is not None, "a pool is of experts"
    routing = cost.routings[pool]
    hit_rate = cost.curves[pool].hit_rate(n * routing.n_blocks / np.maximum(n_blocks, 1))
    missed = (1 - hit_rate) * n_blocks * routing.n_used
    return np.asarray(missed * cost.expert_read_s(kind.experts))


def _numbers(values: Ints) -> tuple[int, ...]:
    return tuple(values.tolist())


def place_units(
    kind: UnitClass, n_in_vram: int, n_in_ram: int
) -> Iterator[tuple[tuple[Tensor, ...], Place]]:
    """Yield each unit and its place.

    In VRAM are the last ones, as the last layers are; in memory are those that are spread evenly
    over the others: pins and reads alternate in all layers.
    """
    n_others = kind.n_units - n_in_vram
    for i, unit in enumerate(kind.units):
        if i >= n_others:
            yield unit, "vram"
        else:
            is_pinned = (i + 1) * n_in_ram // n_others > i * n_in_ram // n_others
            yield unit, "ram" if is_pinned else "stream"
