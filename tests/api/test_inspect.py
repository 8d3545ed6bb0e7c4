"""`headrace inspect`: what it prints for people and programs, on headers of published models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import golden_plans
import header_only
import jsonschema
import msgspec
import numpy as np
import pytest

from headrace.engine.corrections import keep_correction
from headrace.engine.forecast import Correction
from headrace.engine.gguf import read_model
from headrace.engine.profile import Profile
from headrace.engine.routing import ExpertUsage
from headrace.engine.usage import keep_usage
from headrace.server.cli import main
from headrace.server.commands.inspection import Inspection

DENSE, QWEN3, DEEPSEEK = header_only.LLAMA_70B, header_only.QWEN3_30B, header_only.DEEPSEEK_V3
HEADRACE = [sys.executable, "-m", "headrace.server"]
WIDTH = 40


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings and no profile but the test's."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("published")
    return {model.name: header_only.build(model, folder) for model in header_only.MODELS}


@pytest.fixture
def measured(paths: dict[str, Path]) -> Profile:
    """A profile of this machine, as if it were the golden table's."""
    return golden_plans.pretend(paths[DENSE.name], 3.5e9)


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Return exit status and output."""
    status = main(["inspect", *map(str, arguments)])
    return status, capsys.readouterr().out


def inspect_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    _, output = inspect(capsys, *arguments, "--json")
    found: dict[str, Any] = json.loads(output)
    return found


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("memory", ["1GiB", "13.5GiB", "40GiB", "450GiB"])
@pytest.mark.parametrize("model", header_only.MODELS, ids=lambda model: model.name)
def test_json_is_as_its_schema_says(
    model: header_only.Published, memory: str, paths: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = inspect_json(capsys, paths[model.name], "--memory", memory, "--tensors")
    schema = msgspec.json.schema(Inspection)
    jsonschema.validate(found, schema)
    assert (found["plan"] is None) != (found["refusal"] is None)
    assert (found["plan"] is None) == (found["forecast"] is None)
    with pytest.raises(jsonschema.ValidationError, match="nosuch"):
        jsonschema.validate(found | {"nosuch": 1}, schema)


def test_a_plan_is_within_its_budget_and_covers_the_model(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspect_json(capsys, paths[QWEN3.name], "--memory", "8GiB", "--tensors")
    plan = found["plan"]
    memory = ("resident", "stream", "context", "parking", "buffer")
    assert sum(plan[f"{name}_bytes"] for name in memory) <= plan["budget_bytes"] == 8 << 30
    places = {tensor["name"]: tensor["place"] for tensor in found["tensors"]}
    assert places["blk.0.ffn_up_exps.weight"] == "cache"
    assert places["blk.0.attn_q.weight"] == places["output.weight"] == "memory"
    assert len(plan["blocks"]) == QWEN3.n_layer
    assert all(0 < block["resident_bytes"] < block["n_bytes"] for block in plan["blocks"])


@pytest.mark.parametrize("memory", ["16GiB", "64GiB"])
def test_what_goes_to_a_gpu_is_a_tier_of_its_own(
    memory: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    golden_plans.pretend(paths[DENSE.name], 3.5e9, vram_gib=8)
    arguments = (paths[DENSE.name], "--memory", memory)
    found = inspect_json(capsys, *arguments, "--tensors")
    jsonschema.validate(found, msgspec.json.schema(Inspection))
    gpu = found["plan"]["gpu"]
    used = sum(gpu[f"{name}_bytes"] for name in ("weights", "context", "buffer"))
    assert 7 << 30 < used <= gpu["budget_bytes"] < 8 << 30
    places = {tensor["name"]: tensor["place"] for tensor in found["tensors"]}
    sizes = {tensor["name"]: tensor["n_bytes"] for tensor in found["tensors"]}
    in_vram = [name for name, place in places.items() if place == "vram"]
    assert sum(sizes[name] for name in in_vram) == gpu["weights_bytes"]
    assert "output.weight" in in_vram and "token_embd.weight" not in in_vram
    blocks = found["plan"]["blocks"]
    assert blocks[0]["vram_bytes"] == 0 < blocks[-1]["vram_bytes"] <= blocks[-1]["n_bytes"]
    _, output = inspect(capsys, *arguments)
    assert "layers on GPU0" in output and "in the memory of GPU0" in output
    assert inspect_json(capsys, *arguments, "--vram", "0")["plan"]["gpu"] is None


def test_a_split_model_is_told_of_as_one(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    status, output = inspect(capsys, paths[DEEPSEEK.name], "--memory", "32GiB")
    assert status == 0
    for text in ("of 9 files", "376.71 GiB, 671.0B parameters", "256 in a block, 8 used"):
        assert text in output


def test_without_a_profile_there_is_a_plan_and_the_command_that_makes_one(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    status, output = inspect(capsys, paths[DENSE.name], "--memory", "13.5GiB")
    assert status == 0
    assert "dense-ffn-streaming" in output and "tokens/s" not in output
    assert "`headrace profile" in output


@pytest.mark.usefixtures("measured")
def test_a_forecast_says_what_limits_and_what_more_memory_gives(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, output = inspect(capsys, paths[DENSE.name], "--memory", "13.5GiB")
    assert "0.116 tokens/s, limited by the disk" in output
    assert "memory +100 %  27 GiB: 0.209 tokens/s" in output
    _, output = inspect(capsys, paths[DENSE.name], "--memory", "64GiB")
    assert "1.09 tokens/s, limited by memory bandwidth" in output
    assert "memory +" not in output


@pytest.mark.usefixtures("measured")
def test_what_was_learnt_of_the_experts_is_used(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (paths[QWEN3.name], "--memory", "8GiB")
    _, output = inspect(capsys, *arguments)
    assert "84 % are in RAM when chosen (assumed" in output
    counts = np.r_[np.full(16, 9000), np.full(112, 50)]
    keep_usage(read_model(paths[QWEN3.name]), ExpertUsage((counts,) * QWEN3.n_layer), None)
    _, output = inspect(capsys, *arguments)
    assert "98 % are in RAM when chosen (as learnt)" in output


def test_what_was_learnt_of_the_speed_in_that_mode_is_used(
    measured: Profile, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def speed(memory: str) -> float:
        found = inspect_json(capsys, paths[DENSE.name], "--memory", memory)
        return float(found["forecast"]["decode_tokens_per_s"])

    streamed, resident = speed("13.5GiB"), speed("64GiB")
    header = read_model(paths[DENSE.name])
    keep_correction(header, measured.key, "dense-ffn-streaming", Correction(0.5))
    assert speed("13.5GiB") == pytest.approx(streamed / 2)
    assert speed("64GiB") == resident
    _, output = inspect(capsys, paths[DENSE.name], "--memory", "13.5GiB")
    assert "by 0.50, learnt from earlier answers" in output


@pytest.mark.parametrize(
    ("model", "memory", "context"), [(DENSE, "10GiB", 8192), (header_only.MIXTRAL, "10GiB", 32768)]
)
def test_flags_that_are_said_to_help_do(
    model: header_only.Published, memory: str, context: int, paths: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    refused = (paths[model.name], "--memory", memory, "--context", context)
    status, output = inspect(capsys, *refused)
    assert status == 1 and "MiB is there" in output
    flags = inspect_json(capsys, *refused)["refusal"]["helpful_flags"]
    assert len(flags) == 3  # memory, context, type of the KV cache
    for flag in flags:
        assert f"  {flag}\n" in output
        assert inspect_json(capsys, *refused, *flag.split())["refusal"] is None, flag


def test_a_mode_that_the_model_does_not_have_is_said_to_be_wrong(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    status, output = inspect(capsys, paths[DENSE.name], "--mode", "expert-streaming")
    assert status == 1
    assert "has no experts" in " ".join(output.split()) and "would help" not in output


def test_a_wrong_flag_is_2_and_a_missing_model_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect"]) == 2
    assert main(["inspect", "a.gguf", "--memory", "much"]) == 2
    assert main(["inspect", str(tmp_path / "no.gguf")]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("memory", ["4GiB", "13.5GiB", "40GiB"])
def test_a_narrow_terminal_is_kept_to(
    memory: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    for path in paths.values():
        _, output = inspect(capsys, path, "--memory", memory, "--tensors")
        assert max(map(len, output.splitlines())) <= WIDTH


def test_every_block_has_a_bar(paths: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, output = inspect(capsys, paths[DENSE.name], "--memory", "13.5GiB")
    assert sum(output.count(bar) for bar in "▁▂▃▄▅▆▇█") == DENSE.n_layer
    _, output = inspect(capsys, paths[DENSE.name], "--memory", "64GiB")
    assert output.count("█") == DENSE.n_layer and "100 %" in output


def test_an_output_that_knows_no_bars_gets_something_else(paths: dict[str, Path]) -> None:
    run = subprocess.run(
        [*HEADRACE, "inspect", paths[DENSE.name], "--memory", "64GiB"], capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=True,
    )  # fmt: skip
    assert b"?" * 79 in run.stdout and b"chat template" in run.stdout


def start_large_output(path: Path) -> subprocess.Popen[bytes]:
    """Start a command that prints more than a pipe holds."""
    environ = dict(os.environ)
    environ.pop("PYTHONUNBUFFERED", None)  # with it Python takes a part of a write for the whole
    return subprocess.Popen(
        [*HEADRACE, "inspect", str(path), "--memory", "40GiB", "--tensors", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ,
    )  # fmt: skip


def test_a_reader_that_leaves_ends_the_command_quietly(paths: dict[str, Path]) -> None:
    with start_large_output(paths[DEEPSEEK.name]) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(10)
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b""


def test_an_interrupt_ends_the_command_quietly(paths: dict[str, Path]) -> None:
    with start_large_output(paths[DEEPSEEK.name]) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)  # from here on it waits for a reader
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (128 + signal.SIGINT, b"")


def test_nothing_that_could_load_weights_is_imported(paths: dict[str, Path]) -> None:
    code = "import sys; from headrace.server.cli import main; main(sys.argv[1:])"
    code += "; print(*sys.modules, file=sys.stderr)"
    run = subprocess.run(
        [sys.executable, "-c", code, "inspect", paths[DENSE.name], "--memory", "13GiB"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = run.stderr.split()
    assert "headrace.server.commands.inspect" in loaded
    assert not [name for name in loaded if name.startswith(("llama_cpp", "headrace.native"))]
