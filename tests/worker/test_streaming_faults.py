"""What a streamed model does when its weights can't be read: it fails that step, and goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import streamed
from child import run_python
from streamed import Case

from headrace.engine import gguf, llama
from headrace.engine.engine import Engine
from headrace.engine.errors import ModelUnusable, WeightsUnreadable
from headrace.engine.messages import Done, Event, Failed, Generate, Load, SamplingParams, Token
from headrace.engine.plan import ContextPlan, WeightsPlan
from headrace.engine.streaming import WeightStream

Built = Callable[[str], Path]

KINDS = ["dense", "qwen3moe"]
SHIM = Path(__file__).parents[1] / "native" / "eio_shim.c"


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, built: Built, tmp_path: Path) -> Path:
    """Return a copy of a model that a test may damage."""
    return Path(shutil.copy(built(request.param), tmp_path / "model.gguf"))


@pytest.fixture
def plan(path: Path) -> WeightsPlan:
    return streamed.plan(path, 0)


@pytest.fixture
def model(path: Path, plan: WeightsPlan) -> Iterator[llama.Model]:
    model = streamed.load(path, plan, Case(0))
    yield model
    model.close()


def test_a_file_truncated_while_loaded_fails_the_step_with_file_offset_and_reason(
    path: Path, plan: WeightsPlan, model: llama.Model
) -> None:
    streamed.run(model, plan.n_ubatch, n_decode=2)
    last = max(tensor.offset_bytes for tensor in plan.streamed)
    os.truncate(path, last + 8192)
    pattern = (
        rf"{path}: reading \d+ bytes at offset \d+ of blk\.\d+\..*: the file (ends|was changed)"
    )
    with pytest.raises(WeightsUnreadable, match=pattern):
        streamed.run(model, plan.n_ubatch, n_decode=2)


def test_a_file_overwritten_while_loaded_is_never_answered_from(
    path: Path, plan: WeightsPlan, model: llama.Model
) -> None:
    streamed.run(model, plan.n_ubatch, n_decode=2)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")
    with pytest.raises(WeightsUnreadable, match="the file was changed after it was loaded"):
        streamed.run(model, plan.n_ubatch, n_decode=2)


def test_a_file_replaced_while_loaded_goes_on_as_it_was(
    path: Path, plan: WeightsPlan, model: llama.Model, tmp_path: Path
) -> None:
    before = streamed.run(model, plan.n_ubatch, n_decode=4)
    other = tmp_path / "other"
    other.write_bytes(b"\0" * path.stat().st_size)
    other.replace(path)
    assert np.array_equal(streamed.run(model, plan.n_ubatch, n_decode=4), before)


def test_a_file_truncated_while_it_is_loaded_is_refused_and_closed(
    path: Path, plan: WeightsPlan
) -> None:
    header = gguf.read_model(path)
    stream = WeightStream(header, plan, llama.streaming_functions())
    os.truncate(path, next(t for t in header.tensors if t not in plan.streamed).offset_bytes + 1)
    pattern = rf"{path}: reading \d+ bytes at offset \d+: the file ends within them"
    with pytest.raises(ModelUnusable, match=pattern):
        llama.Model(path, stream=stream)
    with pytest.raises(ValueError, match="stream is closed"):
        stream.stats()


def test_a_file_replaced_after_its_header_was_read_is_refused(
    path: Path, plan: WeightsPlan
) -> None:
    header = gguf.read_model(path)
    copy = shutil.copy(path, path.with_suffix(".copy"))
    os.replace(copy, path)
    with pytest.raises(ModelUnusable, match="was replaced while it was opened"):
        WeightStream(header, plan, llama.streaming_functions())


_FAILING_READS = """
import os, sys
from pathlib import Path
import numpy as np
import streamed
from streamed import Case
from headrace.engine import llama
from headrace.engine.errors import WeightsUnreadable

llama.start_backend()
path = Path(sys.argv[1])
made = streamed.plan(path, 0)
model = streamed.load(path, made, Case(0))
before = streamed.run(model, made.n_ubatch, n_decode=4)
for tensor in made.streamed[:: max(1, len(made.streamed) // 6)]:
    os.environ["EIO_AT"] = str(tensor.offset_bytes + tensor.n_bytes // 2)
    try:
        streamed.run(model, made.n_ubatch, n_decode=12)
    except WeightsUnreadable as error:
        print(error)
    else:
        print("no error")
    del os.environ["EIO_AT"]
    assert np.array_equal(streamed.run(model, made.n_ubatch, n_decode=4), before)
model.close()
"""


def test_a_failing_read_fails_its_step_and_later_steps_are_right(
    path: Path, tmp_path: Path
) -> None:
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(SHIM), "-o", str(shim), "-ldl"], check=True)
    lines = run_python(_FAILING_READS, path, LD_PRELOAD=str(shim)).splitlines()
    assert len(lines) >= 6
    for line in lines:
        assert line.startswith(f"{path}: reading "), line
        assert line.endswith(": input/output error"), line


def generate(engine: Engine, events: list[Event], uid: int) -> Failed | str:
    """Return the answer of one greedy request, or its failure."""
    request = Generate(uid=uid, prompt=(), sampling=SamplingParams(temperature=0), n_predict=24)
    engine.submit(request, [1, *streamed.PROMPT[uid : uid + 40]])
    while True:
        engine.turn()
        for event in events:
            if isinstance(event, Failed):
                return event
            if isinstance(event, Done):
                text = "".join(e.text for e in events if isinstance(e, Token)) + event.text
                events.clear()
                return text


def engine_of(model: llama.Model, path: Path, events: list[Event], n_ubatch: int) -> Engine:
    load = Load(
        path=str(path), name="test", n_ctx=256, n_slots=3, n_batch=streamed.N_BATCH, n_threads=1,
        n_threads_batch=1,
    )  # fmt: skip
    return Engine(model, load, lambda n: ContextPlan(n, 3 * n, 0), events.extend, n_ubatch=n_ubatch)


def test_a_request_whose_weights_fail_says_so_and_others_are_not_hurt(
    path: Path, plan: WeightsPlan, model: llama.Model
) -> None:
    events: list[Event] = []
    engine = engine_of(model, path, events, plan.n_ubatch)
    assert isinstance(generate(engine, events, 1), str)
    os.truncate(path, path.stat().st_size // 2)
    failed = generate(engine, events, 2)
    assert isinstance(failed, Failed)
    assert failed.kind == "WeightsUnreadable" and failed.status == 500
    assert str(path) in failed.message
    engine.check()


def test_cancelled_requests_leave_others_the_resident_models_text(
    path: Path, plan: WeightsPlan, model: llama.Model
) -> None:
    texts = []
    for loaded in (model, llama.Model(path, repacks=False)):
        events: list[Event] = []
        engine = engine_of(loaded, path, events, plan.n_ubatch)
        for uid in range(10, 14):  # never finished: each is cancelled somewhere in its way
            request = Generate(uid=uid, prompt=(), n_predict=100)
            engine.submit(request, [1, *streamed.PROMPT[:70]])
            for _ in range(uid - 8):
                engine.cancel(0)  # nobody's: a turn waits for nothing if the answer has ended
                engine.turn()
            engine.cancel(uid)
            engine.turn()
        events.clear()
        texts.append([generate(engine, events, uid) for uid in (1, 2)])
        if loaded is not model:
            engine.close()
    assert texts[0] == texts[1]
    assert all(texts[0])
