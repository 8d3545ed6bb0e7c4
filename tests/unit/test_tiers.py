"""Plans are the fastest that fit: against all others of small models, and with more of anything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec
from golden_plans import machine
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.buffers import process_buffers
from headrace.engine.context_plan import kv_bytes_per_cell
from headrace.engine.errors import DoesNotFit
from headrace.engine.gguf import Header, SourceFile, Tensor
from headrace.engine.messages import Load, Mode
from headrace.engine.pass_time import CostModel
from headrace.engine.placement import VRAM_HEADROOM_BYTES, plan_model
from headrace.engine.plan import WeightsPlan
from headrace.engine.profile import GpuDevice, KernelSpeed, Profile
from headrace.engine.tensors import TensorTable, read_tensors

MIB = 1 << 20
N_EMBD, N_CTX, N_USED = 256, 256, 2
# ggml's numbers, and bytes of a block of 256 weights.
TYPES = {"Q4_K": (12, 144), "Q6_K": (14, 210), "Q8_0": (8, 272)}
Model = tuple[Header, TensorTable]


def tensor(name: str, type_name: str, *shape: int) -> Tensor:
    type_id, block_bytes = TYPES[type_name]
    n_elements = 1
    for n in shape:
        n_elements *= n
    n_bytes = n_elements // 256 * block_bytes
    return Tensor(name, shape, type_name, type_id, 0, n_bytes, n_elements)


def model(tensors: list[Tensor], n_layers: int) -> Model:
    keys = {
        "block_count": n_layers, "embedding_length": N_EMBD, "context_length": N_CTX,
        "attention.head_count": 4, "attention.head_count_kv": 4, "expert_used_count": N_USED,
    }  # fmt: skip
    metadata = {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in keys.items()}
    path = Path("/models/a.gguf")
    source = SourceFile(path, 0, 0, 0, b"")
    header = Header(path, 3, MappingProxyType(metadata), tuple(tensors), 32, 0, (source,))
    return header, read_tensors(header)


def trunk(n_layers: int, has_output: bool) -> list[Tensor]:
    tensors = [tensor("token_embd.weight", "Q4_K", N_EMBD, 512)]
    tensors += [tensor(f"blk.{i}.attn_q.weight", "Q8_0", N_EMBD, 1024) for i in range(n_layers)]
    return tensors + [tensor("output.weight", "Q6_K", N_EMBD, 512)] * has_output


@st.composite
def dense_models(draw: st.DrawFn) -> Model:
    n_layers = draw(st.integers(1, 3))
    kinds = st.sampled_from([("Q4_K", 4096), ("Q6_K", 4096), ("Q4_K", 9216)])
    tensors = trunk(n_layers, draw(st.booleans()))
    for i in range(n_layers):
        for name in ("up", "down"):
            type_name, width = draw(kinds)
            tensors.append(tensor(f"blk.{i}.ffn_{name}.weight", type_name, N_EMBD, width))
    return model(tensors, n_layers)


@st.composite
def expert_models(draw: st.DrawFn) -> Model:
    n_layers, n_experts = draw(st.integers(1, 4)), draw(st.sampled_from([4, 8]))
    type_name = draw(st.sampled_from(["Q4_K", "Q6_K"]))
    tensors = trunk(n_layers, draw(st.booleans()))
    for i in range(n_layers):
        for name in ("up", "down"):
            shape = (N_EMBD, 2048, n_experts)
            tensors.append(tensor(f"blk.{i}.ffn_{name}_exps.weight", type_name, *shape))
    return model(tensors, n_layers)


@st.composite
def profiles(draw: st.DrawFn, *, has_gpu: bool) -> Profile:
    """Return the desktop with kernels, and perhaps a GPU, of any speed."""
    speeds = st.floats(1e9, 60e9)
    backends = ["CPU", "GPU0"] if has_gpu else ["CPU"]
    backends += draw(st.sampled_from([[], ["CPU_REPACK"]]))
    kernels = tuple(
        KernelSpeed(name, draw(speeds), 1e12, 1e12, backend)
        for name in TYPES
        for backend in backends
    )
    gpu = GpuDevice("GPU0", "a GPU", 1 << 40, 1 << 40, draw(st.sampled_from([0.0, 100e9])))
    gpus = (gpu,) if has_gpu else ()
    return msgspec.structs.replace(machine(1e9)[0], kernels=kernels, gpus=gpus)


def load(vram_bytes: int, mode: Mode = "auto") -> Load:
    return Load(
        path="", name="", n_ctx=N_CTX, n_slots=1, n_batch=32, n_threads=1, n_threads_batch=1,
        vram_bytes=vram_bytes, mode=mode, disk_bytes_per_s=1.0,
    )  # fmt: skip


def others(made: Model, plan: WeightsPlan, ram: int, vram: int) -> Iterator[WeightsPlan]:
    """Yield every plan of the mode of plan that fits: all layers, all places of all weights."""
    header, table = made
    units: list[tuple[int, tuple[Tensor, ...]]] = []
    units += [(item.block, (item.tensor,)) for item in table.dense]
    units += [(block.block, block.parts) for block in table.experts]
    streams = plan.mode != "full-resident"
    buffers = process_buffers(header, table, load(0))
    for g in range(table.n_blocks + 2):
        first = table.n_blocks + 1 - g
        on_gpu = {t.name for t in table.trunk if g and t.name == "output.weight"}
        on_gpu |= {t.name for t in table.trunk if t.name[:4] == "blk." and int(t.name[4]) >= first}
        tied = g and "output.weight" not in {t.name for t in table.trunk}
        on_gpu |= {"token_embd.weight"} if tied else set()
        in_vram = [t for t in table.trunk if t.name in on_gpu]
        kept = sum(t.n_bytes for t in table.trunk if t.name not in on_gpu or "embd" in t.name)
        cpu_layers, gpu_layers = slice(None, max(first, 0)), slice(max(first, 0), None)
        n = [kv_bytes_per_cell(header, "f16", layers) for layers in (cpu_layers, gpu_layers)]
        choices = [
            [p for p in ("vram", "ram", "stream")
             if (p != "vram" or block >= first) and (p != "stream" or streams)
             and (p != "ram" or not (streams and table.experts))]
            for block, _ in units
        ]  # fmt: skip
        for places in itertools.product(*choices):
            at = {p: [t for (_, u), q in zip(units, places, strict=True) if q == p for t in u]
                  for p in ("vram", "ram", "stream")}  # fmt: skip
            yield from _fitting(
                plan, table, g, (*in_vram, *at["vram"]), kept, at["ram"], at["stream"],
                N_CTX * n[0], N_CTX * n[1] + buffers.vram_bytes, ram, vram,
            )  # fmt: skip


def _fitting(
    plan: WeightsPlan, table: TensorTable, g: int, in_vram: tuple[Tensor, ...], kept: int,
    in_ram: list[Tensor], streamed: list[Tensor], kv: int, kv_vram: int, ram: int, vram: int,
) -> Iterator[WeightsPlan]:  # fmt: skip
    vram_bytes = sum(t.n_bytes for t in in_vram) + kv_vram if g else 0
    names = {t.name for t in streamed}
    pool = tuple(block for block in table.experts if block.parts[0].name in names)
    made = replace(
        plan, n_gpu_layers=g, gpu="GPU0" if g else "", in_vram=in_vram, streamed=tuple(streamed),
        resident_bytes=kept + sum(t.n_bytes for t in in_ram), kv_bytes=kv, vram_bytes=vram_bytes,
    )  # fmt: skip
    if vram_bytes > vram or (plan.mode != "full-resident" and not streamed):
        return
    if table.experts and plan.mode != "full-resident":
        n_least, n_most = len(pool) * N_USED, sum(block.n_experts for block in pool)
        # What the plan takes for each of its records, and beside them.
        beside = 2 * MIB  # a huge page
        record = (plan.stream_bytes - beside) // plan.pool_records[0]
        for n in range(n_least, n_most + 1):
            of_n = replace(
                made, expert_blocks=(pool,), pool_records=(n,), stream_bytes=n * record + beside
            )
            if of_n.n_bytes <= ram:
                yield of_n
        return
    if plan.n_ring_slots:
        # Pins come after a ring of full size, which at that speed of the disk has three slots.
        slot = (plan.stream_bytes - 2 * MIB) // plan.n_ring_slots
        n_slots = min(3, max(2, len(table.dense))) if in_ram else 2
        made = replace(made, stream_bytes=n_slots * slot + 2 * MIB)
    if made.n_bytes <= ram:
        yield made


def check_fastest(made: Model, profile: Profile, disk: float, ram: int, vram: int) -> None:
    cost = CostModel.of(profile, machine(disk)[1], made[1], None)
    modes: list[Mode] = ["full-resident"]
    modes.append("expert-streaming" if made[1].experts else "dense-ffn-streaming")
    fastest = []
    for mode in modes:
        try:
            plan = plan_model(*made, load(vram, mode), ram, cost)
        except DoesNotFit:
            continue
        assert plan.n_bytes <= ram and plan.vram_bytes <= vram
        fastest += [cost.decode(other).seconds for other in others(made, plan, ram, vram)]
    if fastest:
        plan = plan_model(*made, load(vram), ram, cost)
        assert cost.decode(plan).seconds <= min(fastest) * (1 + 1e-6)


@settings(max_examples=100, deadline=None)
@given(
    made=dense_models(), profile=profiles(has_gpu=True), disk=st.floats(1e8, 1e11),
    ram=st.integers(26 * MIB, 40 * MIB), vram=st.integers(24 * MIB, 36 * MIB),
)  # fmt: skip
def test_no_division_of_a_small_dense_model_is_faster(
    made: Model, profile: Profile, disk: float, ram: int, vram: int
) -> None:
    check_fastest(made, profile, disk, ram, vram)


@settings(max_examples=100, deadline=None)
@given(
    made=expert_models(), profile=profiles(has_gpu=True), disk=st.floats(1e8, 1e11),
    ram=st.integers(26 * MIB, 60 * MIB), vram=st.integers(24 * MIB, 50 * MIB),
)  # fmt: skip
def test_no_division_of_a_small_mixture_is_faster(
    made: Model, profile: Profile, disk: float, ram: int, vram: int
) -> None:
    check_fastest(made, profile, disk, ram, vram)


@settings(max_examples=150, deadline=None)
@given(
    made=st.one_of(dense_models(), expert_models()), profile=profiles(has_gpu=True),
    disk=st.floats(1e8, 1e11),
    rams=st.lists(st.integers(26 * MIB, 60 * MIB), min_size=2, max_size=2),
    vrams=st.lists(st.integers(0, 50 * MIB), min_size=2, max_size=2),
)  # fmt: skip
def test_more_memory_of_either_kind_is_never_slower(
    made: Model, profile: Profile, disk: float, rams: list[int], vrams: list[int]
) -> None:
    cost = CostModel.of(profile, machine(disk)[1], made[1], None)
    try:
        less = plan_model(*made, load(min(vrams)), min(rams), cost)
    except DoesNotFit:
        return  # nothing to compare with
    more = plan_model(*made, load(max(vrams)), max(rams), cost)
    assert cost.decode(more).seconds <= cost.decode(less).seconds * (1 + 1e-6)


@settings(max_examples=50, deadline=None)
@given(made=st.one_of(dense_models(), expert_models()), profile=profiles(has_gpu=True))
def test_a_gpu_is_not_used_where_that_is_slower(made: Model, profile: Profile) -> None:
    others = [kernel for kernel in profile.kernels if kernel.backend != "GPU0"]
    slow = [KernelSpeed(name, 1e8, 1e12, 1e12, "GPU0") for name in TYPES]
    profile = msgspec.structs.replace(profile, kernels=(*others, *slow))
    cost = CostModel.of(profile, machine(1e9)[1], made[1], None)
    plan = plan_model(*made, load(1 << 30), 1 << 30, cost)
    assert (plan.mode, plan.gpu, plan.n_gpu_layers, plan.vram_bytes) == ("full-resident", "", 0, 0)


def gpu_plan(made: Model, vram_bytes: int | None, **of_gpu: int) -> WeightsPlan:
    """Return the plan on a machine with a fast GPU."""
    kernels = [KernelSpeed(name, 400e9, 1e13, 1e13, "GPU0") for name in TYPES]
    kernels += [KernelSpeed(name, 40e9, 1e12, 1e12) for name in TYPES]
    whole = GpuDevice("GPU0", "a GPU", 1 << 33, 1 << 33)
    gpu = msgspec.structs.replace(whole, **of_gpu)
    profile = msgspec.structs.replace(machine(1e9)[0], kernels=tuple(kernels), gpus=(gpu,))
    cost = CostModel.of(profile, machine(1e9)[1], made[1], None)
    return plan_model(*made, msgspec.structs.replace(load(0), vram_bytes=vram_bytes), 1 << 30, cost)


def dense_model() -> Model:
    tensors = trunk(3, has_output=True)
    tensors += [tensor(f"blk.{i}.ffn_up.weight", "Q4_K", N_EMBD, 4096) for i in range(3)]
    return model(tensors, 3)


def test_all_but_the_embeddings_is_on_a_gpu_that_has_room() -> None:
    header, table = dense_model()
    plan = gpu_plan((header, table), None)
    assert (plan.gpu, plan.n_gpu_layers, plan.in_ram) == ("GPU0", 4, ())
    assert {t.name for t in header.tensors} - {t.name for t in plan.in_vram} == {
        "token_embd.weight"
    }
    assert plan.kv_bytes == 0 < plan.vram_kv_bytes
    assert plan.vram_budget_bytes == (1 << 33) - VRAM_HEADROOM_BYTES


def test_a_setting_bounds_the_gpus_memory_and_zero_turns_it_off() -> None:
    made = dense_model()
    whole = gpu_plan(made, None)
    less = gpu_plan(made, whole.vram_bytes - 1)
    assert less.gpu == "GPU0" and less.vram_bytes < whole.vram_bytes
    assert gpu_plan(made, whole.vram_bytes).n_gpu_layers == 4
    assert gpu_plan(made, 0) == gpu_plan(made, None, free_bytes=0)
    assert gpu_plan(made, 0).gpu == ""


def test_weights_of_layers_on_the_gpu_that_stay_in_memory_are_named() -> None:
    made = dense_model()
    whole = gpu_plan(made, None)
    ffn_bytes = made[1].dense_bytes
    plan = gpu_plan(made, whole.vram_bytes - ffn_bytes // 3)
    on_gpu = {tensor.name for tensor in plan.in_vram}
    first = made[1].n_blocks + 1 - plan.n_gpu_layers
    assert {tensor.name for tensor in plan.in_ram} == {
        item.tensor.name
        for item in made[1].dense
        if item.block >= first and item.tensor.name not in on_gpu
    }
    n_bytes = sum(t.n_bytes for t in made[0].tensors if t.name not in on_gpu)
    assert plan.resident_bytes == n_bytes


def test_forecasts_are_corrected_apart_for_what_is_on_a_beside_and_without_a_gpu() -> None:
    made = dense_model()
    whole = gpu_plan(made, None)
    part = gpu_plan(made, whole.vram_bytes - 1)
    without = gpu_plan(made, 0)
    assert [plan.way for plan in (whole, part, without)] == [
        "full-resident on GPU0", "full-resident beside GPU0", "full-resident",
    ]  # fmt: skip


def test_a_gpu_that_shares_the_processors_memory_is_not_used() -> None:
    assert gpu_plan(dense_model(), None, is_integrated=True).gpu == ""


def test_a_gpu_without_measured_kernels_is_not_used() -> None:
    gpu = GpuDevice("GPU0", "a GPU", 1 << 33, 1 << 33)
    profile = msgspec.structs.replace(machine(1e9)[0], gpus=(gpu,))
    made = dense_model()
    cost = CostModel.of(profile, machine(1e9)[1], made[1], None)
    asked = msgspec.structs.replace(load(0), vram_bytes=None)
    assert plan_model(*made, asked, 1 << 30, cost).gpu == ""
