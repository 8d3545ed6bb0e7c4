"""`headrace run` as a user has it: in a pipe, and on a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from serving import Server
from terminal import Terminal

pytestmark = pytest.mark.e2e

HEADRACE = [sys.executable, "-m", "headrace.server"]
GREEDY = ["--temperature", "0"]
STORY = "Tell me a very long story about a dragon."
Run = Callable[..., subprocess.CompletedProcess[str]]
OpenChat = Callable[..., Terminal]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with folders of its own."""
    folders = {name: str(tmp_path / name) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    return {**os.environ, **folders}


@pytest.fixture
def run(smollm2_path: Path, environ: dict[str, str]) -> Run:
    """Run the command with flags and what is on its stdin."""

    def run_once(*flags: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        command = [*HEADRACE, "run", str(smollm2_path), *flags]
        done = subprocess.run(
            command, input=stdin, capture_output=True, env=environ, timeout=100, check=False
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    return run_once


@pytest.fixture
def open_chat(smollm2_path: Path, environ: dict[str, str]) -> Iterator[OpenChat]:
    """Open chats on terminals; they are past their first prompt."""
    with contextlib.ExitStack() as stack:

        def open_one(*flags: str, n_columns: int = 80) -> Terminal:
            command = [*HEADRACE, "run", str(smollm2_path), *GREEDY, *flags]
            chat = stack.enter_context(Terminal(command, environ, n_columns))
            chat.expect(">>> ")
            return chat

        yield open_one


def greedy_answer(server: Server, *messages: tuple[str, str], n_predict: int) -> str:
    """Return what /api/chat answers."""
    body = {
        "model": server.names()[0],
        "messages": [{"role": role, "content": content} for role, content in messages],
        "options": {"temperature": 0, "num_predict": n_predict},
        "stream": False,
    }
    answer = httpx.post(f"{server.url}/api/chat", json=body, timeout=60).json()
    return str(answer["message"]["content"])


# ---- in a pipe ----


def test_prompt_gets_the_servers_answer_on_stdout_alone(run: Run, smollm2_server: Server) -> None:
    question = "Why is the sky blue?"
    done = run("--prompt", question, *GREEDY, "--max-tokens", "24", "--context", "2048")
    expected = greedy_answer(smollm2_server, ("user", question), n_predict=24)
    assert (done.stdout, done.returncode) == (expected + "\n", 0)
    [line] = done.stderr.splitlines()
    assert line.startswith("SmolLM2-135M-Instruct.Q4_1:latest: full-resident: ")


def test_stdin_is_the_prompt_and_system_goes_before_it(run: Run, smollm2_server: Server) -> None:
    flags = ("--system", "You are a pirate.", *GREEDY, "--max-tokens", "16", "--context", "2048")
    done = run(*flags, stdin="Grüße!\nWho are you?".encode())
    messages = ("system", "You are a pirate."), ("user", "Grüße!\nWho are you?")
    assert done.stdout == greedy_answer(smollm2_server, *messages, n_predict=16) + "\n"


def test_model_that_is_streamed_says_the_same(run: Run) -> None:
    flags = ("--prompt", "Name a colour.", *GREEDY, "--max-tokens", "16")
    streamed = run(
        *flags, "--mode", "dense-ffn-streaming", "--memory", "150MiB", "--context", "512"
    )
    assert "dense-ffn-streaming" in streamed.stderr
    assert streamed.stdout == run(*flags, "--context", "512").stdout


def test_seed_makes_an_answer_repeatable(run: Run) -> None:
    flags = ("--prompt", STORY, "--max-tokens", "12", "--temperature", "1.5")
    first, second, other = (run(*flags, "--seed", seed).stdout for seed in ("7", "7", "8"))
    assert first == second != other


def test_verbose_says_on_stderr_what_the_answer_took(run: Run) -> None:
    done = run("--prompt", "Hi", *GREEDY, "--max-tokens", "4", "--verbose")
    names = [line.partition(":")[0] for line in done.stderr.splitlines()[-8:]]
    assert names == [
        "total duration", "load duration", "prompt eval count", "prompt eval duration",
        "prompt eval rate", "eval count", "eval duration", "eval rate",
    ]  # fmt: skip
    assert re.search(r"^eval count: +4 token\(s\)$", done.stderr, re.MULTILINE)


def test_thinking_goes_to_stderr(run: Run, tmp_path: Path) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
        "<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>\n"
    )
    flags = (*GREEDY, "--max-tokens", "8", "--chat-template-file", str(template))
    done = run("--prompt", "Name a colour.", *flags)
    assert (done.stdout, done.returncode) == ("", 0)
    _, thinking = done.stderr.split("\nThinking...\n")
    thought, end, rest = thinking.partition("\n...done thinking.\n\n")
    assert (bool(thought), bool(end), rest) == (True, True, "")


def test_reader_that_leaves_ends_the_command_quietly(
    smollm2_path: Path, environ: dict[str, str]
) -> None:
    command = [*HEADRACE, "run", str(smollm2_path), "--prompt", STORY, *GREEDY]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert len(os.read(process.stdout.fileno(), 10)) > 0
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(60) == 128 + signal.SIGPIPE
    assert "Traceback" not in errors and "error" not in errors


def test_interrupt_ends_a_single_answer(smollm2_path: Path, environ: dict[str, str]) -> None:
    command = [*HEADRACE, "run", str(smollm2_path), "--prompt", STORY, *GREEDY]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        os.read(process.stdout.fileno(), 10)
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read().decode()
        assert process.wait(60) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("flags", "stdin", "message"),
    [
        ([], b"\xff", "not UTF-8"),
        (["--memory", "1MiB", "--mode", "dense-ffn-streaming"], b"x", "MiB is there"),
        (["--context", "32"], b"word " * 99, "prompt too long"),
    ],
)
def test_what_can_not_be_done_is_one_line_and_1(
    run: Run, flags: list[str], stdin: bytes, message: str
) -> None:
    done = run(*flags, stdin=stdin)
    assert (done.returncode, done.stdout.strip()) == (1, "")
    line = done.stderr.splitlines()[-1]
    assert line.startswith("headrace: error: ") and message in line
    assert "Traceback" not in done.stderr


# ---- on a terminal ----


def test_second_turn_reuses_the_first_and_interrupt_stops_only_the_answer(
    open_chat: OpenChat,
) -> None:
    chat = open_chat("--verbose")
    chat.type("Name a colour.\n")
    first = chat.expect(">>> ")
    assert "prompt eval cached" not in first
    n_first = int(re.findall(r"eval count: +(\d+)", first)[0])
    chat.type("And another one?\n")
    second = chat.expect(">>> ")
    # The first prompt whole, and the answer to it.
    assert int(re.findall(r"prompt eval cached: +(\d+)", second)[0]) > n_first
    chat.type(f"{STORY}\n")
    chat.expect("dragon.\n")  # the echo
    chat.expect(" ")  # and the first word of the answer
    chat.type("\x03")
    assert "eval count" not in chat.expect(">>> ")
    chat.type("Half a line")
    chat.expect("a line")
    chat.type("\x03")
    chat.type("\n")  # a signal that comes before readline waits is noticed after the next key
    chat.expect("/bye leaves")
    chat.type("Name a fruit.\n")
    assert "eval count" in chat.expect("eval rate")
    chat.type("/bye\n")
    assert chat.wait() == 0


def test_end_of_input_leaves(open_chat: OpenChat) -> None:
    chat = open_chat()
    chat.type("\x04")
    assert chat.wait() == 0


def test_commands_change_what_is_answered(open_chat: OpenChat) -> None:
    chat = open_chat()

    def told(line: str) -> str:
        chat.type(f"{line}\n")
        chat.expect(line.splitlines()[-1] + "\n")  # the echo
        return chat.expect(">>> ")

    assert "num_predict is 3" in told("/set parameter num_predict 3")
    short = told("Name a colour.")
    assert 0 < len(short.split()) <= 3
    assert told("/clear").strip() == "the conversation is forgotten"
    assert told("Name a colour.") == short
    assert "system message is set" in told('/set system """You are\na pirate."""')
    shown = told("/show")
    assert "pirate." in shown and "num_predict  3" in shown and "134.52M parameters" in shown
    for line, reply in (
        ("/set parameter nosuch 3", "unknown parameter 'nosuch'"),
        ("/set parameter top_k x", "must be of type integer"),
        ("/set parameter top_k 1 2", "2 values"),
        ("/set", "expected /set system"),
        ("/nosuch", "/? lists the commands"),
        ("/?", "/set parameter NAME VALUE"),
    ):
        assert reply in told(line)


def test_message_of_several_lines_is_one_question(
    open_chat: OpenChat, smollm2_server: Server
) -> None:
    chat = open_chat("--max-tokens", "12", "--context", "2048")
    chat.type('"""/bye\nis a command. What does\nit do?"""\n')
    chat.expect('it do?"""\n')
    question = "/bye\nis a command. What does\nit do?"
    expected = greedy_answer(smollm2_server, ("user", question), n_predict=12)
    assert chat.expect(">>> ").strip() == expected.strip()


def test_long_conversation_goes_on_without_its_oldest_messages(open_chat: OpenChat) -> None:
    chat = open_chat("--context", "256", "--max-tokens", "8", "--verbose")
    for _ in range(6):
        chat.type("word " * 60 + "\n")
        assert "error" not in chat.expect("eval rate: ")
        chat.expect(">>> ")


def test_lines_are_remembered_in_a_file_of_the_users_own(
    open_chat: OpenChat, environ: dict[str, str]
) -> None:
    chat = open_chat()
    chat.type("/show\n")
    chat.expect("context")
    chat.type("/bye\n")
    assert chat.wait() == 0
    history = Path(environ["XDG_CACHE_HOME"]) / "headrace" / "history"
    assert history.read_text().splitlines() == ["/show", "/bye"]
    assert history.stat().st_mode & 0o077 == 0
    chat = open_chat()
    chat.type("\x10\x10\n")  # Ctrl-P twice: the line before the last
    chat.expect("134.52M")


def test_narrow_terminal_gets_the_whole_answer(open_chat: OpenChat, run: Run) -> None:
    chat = open_chat("--max-tokens", "16", n_columns=20)
    chat.type("Name a bird.\n")
    chat.expect("bird.\n")
    answer = run("--prompt", "Name a bird.", *GREEDY, "--max-tokens", "16").stdout
    assert chat.expect(">>> ").strip() == answer.strip()
