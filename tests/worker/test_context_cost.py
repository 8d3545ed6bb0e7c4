"""What llama.cpp says beforehand that a context takes is what the real one takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import header_only
import msgspec
import pytest
import streamed
from child import run_python
from streamed import Case

from headrace.engine import gguf, llama, questions
from headrace.engine.context_cost import ask_context_cost, with_context_cost
from headrace.engine.context_plan import kv_bytes_per_cell
from headrace.engine.errors import EngineError
from headrace.engine.kv_cache import n_sequence_ids
from headrace.engine.llama_log import ContextBytes
from headrace.engine.messages import ContextCost, Load

Built = Callable[[str], Path]
MIB = 1 << 20
N_SLOTS = 3


def load(path: Path, **changes: object) -> Load:
    defaults: dict[str, object] = {
        "name": "", "n_ctx": 8192, "n_slots": N_SLOTS, "n_batch": 512, "n_threads": 1,
        "n_threads_batch": 1,
    }  # fmt: skip
    return Load(path=str(path), **defaults | changes)  # type: ignore[arg-type]


def said(model: llama.Model, n_cells: int, kv_type: str) -> ContextBytes:
    """Return what llama.cpp says of a real context as an engine makes it."""
    n_seqs = n_sequence_ids(N_SLOTS, can_cut=not model.is_recurrent)
    context = llama.Context(
        model, n_cells=n_cells, n_seqs=n_seqs, n_batch=512, n_threads=1, n_threads_batch=1,
        kv_type=kv_type,
    )  # fmt: skip
    context.close()
    assert context.said_bytes is not None
    return context.said_bytes


def check(model: llama.Model, cost: ContextCost, n_cells: int) -> None:
    real = said(model, n_cells, cost.kv_type)
    kv_bytes = n_cells * cost.kv_bytes_per_cell
    all_bytes = kv_bytes + n_cells * cost.mask_bytes_per_cell + cost.fixed_bytes
    assert all_bytes == pytest.approx(real.n_bytes, abs=MIB)
    if not model.is_recurrent:
        assert kv_bytes == pytest.approx(real.memory_bytes, abs=MIB)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models_take_what_was_said(
    backend: None, name: str, kv_type: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(f"{name}_path")
    cost = ask_context_cost(gguf.read_model(path), load(path, kv_type=kv_type))
    model = llama.Model(path)
    for n_cells in (1024, 4096, 32768):
        check(model, cost, n_cells)
    model.close()


@pytest.mark.parametrize("name", ["dense", "split_dense", "qwen3moe", "split_moe"])
def test_streamed_models_take_what_was_said(name: str, built: Built) -> None:
    path = built(name)
    cost = ask_context_cost(gguf.read_model(path), load(path))
    model = streamed.load(path, streamed.plan(path, 0.5), Case(0.5))
    for n_cells in (1024, 8192):
        check(model, cost, n_cells)
    model.close()


def test_states_of_recurrent_layers_do_not_grow_with_cells(
    backend: None, tiny_mamba_path: Path
) -> None:
    cost = ask_context_cost(gguf.read_model(tiny_mamba_path), load(tiny_mamba_path, kv_type="f32"))
    assert cost.kv_bytes_per_cell == 0
    model = llama.Model(tiny_mamba_path)
    check(model, cost, 4096)
    model.close()


@pytest.mark.parametrize("published", header_only.MODELS, ids=lambda model: str(model.name))
def test_of_a_file_larger_than_the_memory_only_the_header_is_read(
    published: header_only.Published, tmp_path: Path
) -> None:
    path = header_only.build(published, tmp_path)
    code = """
import resource, sys
from pathlib import Path

import msgspec
from headrace.engine import gguf, llama
from headrace.engine.context_cost import ask_context_cost
from headrace.engine.messages import Load

llama.start_backend()
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
header = gguf.read_model(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load = msgspec.json.decode(sys.argv[2], type=Load)
cost = ask_context_cost(header, load)
grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
assert grown_mib < 100, grown_mib
print(msgspec.json.encode(cost).decode())
"""
    asked = msgspec.json.encode(load(path)).decode()
    cost = msgspec.json.decode(run_python(code, path, asked), type=ContextCost)
    estimate = kv_bytes_per_cell(gguf.read_model(path), "f16")
    if published is header_only.DEEPSEEK_V3:
        # Its cells hold one latent vector, which the estimate takes for keys and values.
        assert cost.kv_bytes_per_cell == pytest.approx(61 * 576 * 2, rel=0.001)
        assert estimate > 1.8 * cost.kv_bytes_per_cell
    else:
        assert cost.kv_bytes_per_cell == pytest.approx(estimate, rel=0.001)


def test_a_process_of_its_own_is_told_the_same_and_the_same_reason(
    backend: None, built: Built, tmp_path: Path
) -> None:
    path = built("qwen3moe")
    asked = load(path)
    assert questions.context_cost(asked) == ask_context_cost(gguf.read_model(path), asked)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF, and then nothing")
    with pytest.raises(EngineError, match=str(path)):
        questions.context_cost(load(path))


def test_a_model_that_llama_cpp_refuses_is_planned_with_estimates_and_it_is_told(
    built: Built, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(built("dense").read_bytes())
    header, wanted = gguf.read_model(path), load(path)
    path.write_bytes(b"GGUF, and then nothing")
    with caplog.at_level(logging.WARNING):
        assert with_context_cost(header, wanted) == wanted
    assert "are estimated: " in caplog.text and str(path) in caplog.text
