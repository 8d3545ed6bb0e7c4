"""`headrace run MODEL`: answers of a model on the terminal or in a pipe, without a server.

One answer to --prompt or to what stdin holds, or a chat. The answer goes to stdout, all else to
stderr: a pipe gets the text alone.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.config import Settings
from headrace.config.settings import FlagParser, resolve
from headrace.engine.cache_files import cache_folder
from headrace.engine.errors import InvalidRequest
from headrace.engine.hardware import this_machine
from headrace.engine.library import Model, read_template
from headrace.engine.loading import LoadedEngine
from headrace.engine.messages import SamplingParams
from headrace.engine.placement import plan_load
from headrace.engine.plan import describe
from headrace.server import log
from headrace.server.announcement import describe_speed
from headrace.server.commands import answers
from headrace.server.commands.chat_session import ChatSession
from headrace.server.commands.interactive import Interactive, line_history
from headrace.server.commands.local_engine import LocalEngine
from headrace.server.commands.progress import say
from headrace.server.options import SAMPLING, number

SETTINGS = ("memory", "vram", "mode", "context", "threads", "kv_cache_type", "chat_template_file")


@dataclass(frozen=True, slots=True)
class _Job:
    """What the command line asks for."""

    model: Path
    settings: Settings
    prompt: str | None
    is_interactive: bool
    system: str
    parameters: dict[str, object]
    is_verbose: bool


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Answer what arguments ask; return the exit status.

    Raises:
        SettingsError: a flag is wrong.
        EngineError: the model can't be loaded, or a single prompt can't be answered.
    """
    job = _parse(arguments, environ)
    is_coloured = sys.stderr.isatty() and not environ.get("NO_COLOR")
    log.configure("warning", is_coloured=is_coloured)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may know fewer characters than models
    prompt = job.prompt
    if prompt is None and not job.is_interactive:
        prompt = _read_prompt()
    if prompt is not None and not prompt.strip():
        raise InvalidRequest("the prompt is empty")
    model = Model.open(job.model, read_template(job.settings.chat_template_file))
    load = plan_load(model, replace(job.settings, parallel=1), this_machine())
    say(f"loading {model.name}")
    try:
        engine = LocalEngine(load, learns=True)
    finally:
        say("")
    with engine:
        print(*_load_lines(model, engine.loaded), sep="\n", file=sys.stderr)
        chat = _Chat(job, model, engine, is_coloured=is_coloured)
        if prompt is not None:
            chat.ask(prompt)
        if job.is_interactive:
            chat.run(cache_folder() / "history")
    return 0


class _Chat:
    """One conversation, shown as it goes on."""

    def __init__(self, job: _Job, model: Model, engine: LocalEngine, *, is_coloured: bool) -> None:
        self._job, self._model, self._engine = job, model, engine
        self._session = ChatSession(engine, model, job.parameters, job.system)
        self._is_coloured = is_coloured
        self._load_ns = engine.loaded.load_ns

    def ask(self, text: str) -> None:
        """Show the answer to text, and what it took if that was asked for."""
        with contextlib.closing(self._session.ask(text)) as pieces:
            answers.show(pieces, is_coloured=self._is_coloured)
        if self._job.is_verbose and self._session.cost is not None:
            print("\n" + answers.describe(self._session.cost, self._load_ns), file=sys.stderr)
        self._load_ns = 0

    def run(self, history: Path) -> None:
        """Answer what the user types until they leave."""
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        with line_history(history) if is_terminal else contextlib.nullcontext():
            Interactive(self._session, self.ask, self._facts).run()

    def _facts(self) -> dict[str, str]:
        details, loaded = self._model.details, self._engine.loaded
        return {
            "model": str(self._model.name),
            "file": str(self._model.path),
            "size": f"{details.parameter_size} parameters, {details.quantization_level}",
            "context": f"{self._engine.n_ctx} tokens",
            "memory": describe(loaded.plan, loaded.budget_bytes),
        }


def _parse(arguments: Sequence[str], environ: Mapping[str, str]) -> _Job:
    parser = FlagParser("headrace run", "[flags] MODEL", "Chat with a model, or ask it once.")
    parser.add_argument("model", type=Path, metavar="MODEL", help="a GGUF file")
    parser.add_argument("--prompt", metavar="TEXT", help="answer TEXT and end (default: stdin)")
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="chat; the default without --prompt when stdin is a terminal",
    )
    parser.add_argument("--system", metavar="TEXT", default="", help="the system message")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, help="most tokens of an answer (default: no limit)"
    )
    parser.add_argument("--verbose", action="store_true", help="say after each answer what it took")
    sampling = parser.add_argument_group("sampling, as Ollama's options")
    defaults = SamplingParams()
    for key in (*SAMPLING, "seed"):
        flag = "--" + key.replace("_", "-")
        sampling.add_argument(
            flag, metavar="X", type=number, help=f"default {getattr(defaults, key)}"
        )
    parser.add_settings(SETTINGS)
    found = vars(parser.parse_args(arguments))
    settings, _ = resolve(found, environ)
    parameters = {key: found[key] for key in (*SAMPLING, "seed") if found[key] is not None}
    if found["max_tokens"] is not None:
        parameters["num_predict"] = found["max_tokens"]
    is_interactive = found["interactive"] or (found["prompt"] is None and sys.stdin.isatty())
    return _Job(
        found["model"], settings, found["prompt"], is_interactive, found["system"], parameters,
        found["verbose"],
    )  # fmt: skip


def _read_prompt() -> str:
    """Return all of stdin.

    Raises:
        InvalidRequest: it is not text.
    """
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not UTF-8 text: {error.reason}") from error


def _load_lines(model: Model, loaded: LoadedEngine) -> Iterator[str]:
    plan = describe(loaded.plan, loaded.budget_bytes)
    yield f"{model.name}: {plan}; loaded in {loaded.load_ns / 1e9:.2f} s"
    if loaded.forecast is not None:
        yield f"forecast: {describe_speed(loaded.forecast)}"
