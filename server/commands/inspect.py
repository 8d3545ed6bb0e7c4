"""`headrace inspect MODEL`: what a model is, where its weights would go, how fast it would be.

In: a command line. Out: tables on stdout, or one JSON object. Reads the headers of the model's
files, what was measured of this machine and what was learnt of the model's experts before, and has
llama.cpp asked what a context takes; loads nothing and measures nothing.
"""

from __future__ import annotations

import io
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from headrace.config.settings import FlagParser, resolve
from headrace.engine.corrections import read_corrections
from headrace.engine.errors import EngineError
from headrace.engine.hardware import this_machine
from headrace.engine.library import Model
from headrace.engine.loading import budget_bytes
from headrace.engine.messages import Load
from headrace.engine.placement import plan_load
from headrace.engine.profile_cache import read_measured
from headrace.engine.questions import context_cost
from headrace.engine.tensors import read_tensors
from headrace.engine.usage import read_usage
from headrace.server.commands import inspect_view
from headrace.server.commands.inspection import inspect

SETTINGS = ("memory", "vram", "mode", "context", "parallel", "threads", "kv_cache_type")


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print what arguments ask for; return the exit status, 1 if the model does not fit.

    Raises:
        SettingsError: a flag is wrong.
        EngineError: the model's header can't be read, or is not of a language model.
    """
    wanted = _parse(arguments)
    settings, _ = resolve(vars(wanted), environ)
    model, topology = Model.open(wanted.model), this_machine()
    load = _with_context_cost(plan_load(model, settings, topology))
    measured = read_measured(topology, load.n_threads, model.path)
    found = inspect(
        model, load, budget_bytes(load), measured,
        read_usage(model.header, read_tensors(model.header).experts),
        read_corrections(model.header, measured[0].key) if measured else {},
        lists_tensors=wanted.tensors,
    )  # fmt: skip
    if wanted.json:
        text = msgspec.json.encode(found).decode() + "\n"
    else:
        console = Console(highlight=False)
        with console.capture() as captured:
            inspect_view.show(found, console)
        text = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal may know no bars
    # Flushed here, so that a reader who has left is noticed here.
    print(text, end="", flush=True)
    return 1 if found.refusal else 0


def _with_context_cost(load: Load) -> Load:
    """Return load with what llama.cpp says of its context; if it says nothing, tell that."""
    try:
        return msgspec.structs.replace(load, context_cost=context_cost(load))
    except EngineError as error:
        estimated = "the sizes of the context and its buffers are estimated"
        print(f"headrace: {estimated}: {error}", file=sys.stderr)
        return load


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = FlagParser(
        "headrace inspect", "[flags] MODEL",
        "Show what a model is, where its weights would go and how fast it would be.",
    )  # fmt: skip
    parser.add_argument("model", type=Path, metavar="MODEL", help="a GGUF file, or the first part")
    parser.add_argument("--tensors", action="store_true", help="list all tensors, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_settings(SETTINGS)
    return parser.parse_args(arguments)
