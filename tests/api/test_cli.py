"""The command line: what it prints and its exit statuses."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.server.cli import main


@pytest.fixture(autouse=True)
def no_settings_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_version_and_help_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headrace ")
    assert main(["--help"]) == 0
    assert "headrace serve MODEL.gguf" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nosuch"], ["serve"], ["serve", "--nosuch"]])
def test_wrong_command_line_is_2_with_nothing_on_stdout(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err


@pytest.mark.parametrize(
    ("command", "flags", "named"),
    [
        ("run", [], "MODEL"),
        ("run", ["a.gguf", "--nosuch"], "--nosuch"),
        ("run", ["a.gguf", "--top-k", "many"], "--top-k"),
        ("run", ["a.gguf", "--temperature", "nan"], "--temperature"),
        ("run", ["a.gguf", "--memory", "much"], "memory"),
        ("run", ["a.gguf", "--port", "80"], "--port"),
        ("bench", [], "MODEL"),
        ("bench", ["a.gguf", "-r", "0"], "-r"),
        ("bench", ["a.gguf", "--mode", "fast"], "mode"),
    ],
)
def test_wrong_flag_of_a_command_is_one_line_and_2(
    command: str, flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *flags]) == 2
    output = capsys.readouterr()
    [line] = output.err.splitlines()
    assert (output.out, named in line) == ("", True)


def test_effective_settings_are_shown_with_their_sources(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--show-config", "--port", "99"]) == 0
    assert "port = 99 (flag)" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["serve"], ["run", "--prompt", "hi"], ["bench"]])
def test_model_that_is_missing_is_one_line_and_1(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no.gguf"
    assert main([*command, str(path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headrace: error: {path}")


def test_empty_prompt_is_one_line_and_1(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(tiny_gguf), "--prompt", " \n"]) == 1
    assert capsys.readouterr().err == "headrace: error: the prompt is empty\n"


def test_port_that_is_taken_is_one_line_and_1(
    tiny_gguf: Path, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tiny_gguf), "--port", str(taken_port)]) == 1
    assert capsys.readouterr().err == (
        f"headrace: error: can't listen on 127.0.0.1 port {taken_port}: Address already in use\n"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "no such file"), (b"\xff", "not UTF-8"), (b"{% if %}", "line 1")],
)
def test_unreadable_chat_template_is_one_line_and_status_1(
    tiny_gguf: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    reason: str,
) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    assert main(["serve", str(tiny_gguf), "--chat-template-file", str(path)]) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert reason in error
    assert error.count("\n") == 1


def test_server_process_loads_no_engine_code() -> None:
    code = "import sys, headrace.server.cli, headrace.server.app; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    never = ("llama_cpp", "headrace.native", "headrace.engine.engine", "headrace.engine.worker")
    assert not [module for module in run.stdout.split() if module.startswith(never)]
