"""The console scripts: `headrace` with its commands, and `serve`, which is `headrace serve`.

Comes in a command line, goes out an exit status: 0 is fine, 1 is "can't be done", 2 is a wrong
command line. Errors that a user can cause are one line on stderr.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial

import uvloop

from headrace.config import Loaded, Settings, SettingsError, load
from headrace.config.settings import describe
from headrace.engine.errors import EngineError
from headrace.engine.hardware import this_machine
from headrace.engine.library import Library, read_template
from headrace.engine.openmp import installed_environment
from headrace.engine.placement import plan_load
from headrace.engine.profiling import measured_profile, weight_types
from headrace.server import app, log
from headrace.server.models import Models

logger = logging.getLogger(__name__)

USAGE = """\
usage: headrace serve MODEL.gguf ... [--FLAG VALUE ...]
       headrace run MODEL.gguf [--prompt TEXT] [--FLAG VALUE ...]
       headrace bench MODEL.gguf [--baseline] [--FLAG VALUE ...]
       headrace inspect MODEL.gguf [--tensors] [--json] [--FLAG VALUE ...]
       headrace profile [MODEL.gguf] [--force] [--json]
       headrace iobench MODEL.gguf [--json]
       headrace checksum FILE ...  SHA-256 of model files
       headrace COMMAND --help     all flags of a command
       headrace --version
"""
OK, CANT_SERVE, WRONG_USAGE = 0, 1, 2
INTERRUPTED, BROKEN_PIPE = 128 + signal.SIGINT, 128 + signal.SIGPIPE
BACKLOG = 2048


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of argv, which is the process's own by default; return its exit status."""
    try:
        match list(sys.argv[1:] if argv is None else argv):
            case ["serve", *arguments]:
                return _serve(arguments)
            # Imported when asked for: they bring the engine's far side into this process.
            case ["run", *arguments]:
                from headrace.server.commands import run

                return run.main(arguments, os.environ)
            case ["bench", *arguments]:
                from headrace.server.commands import bench

                return bench.main(arguments, os.environ)
            case ["inspect", *arguments]:
                from headrace.server.commands import inspect

                return inspect.main(arguments, os.environ)
            case ["profile", *arguments]:
                from headrace.server.commands import profile

                return profile.main(arguments)
            case ["iobench", *arguments]:
                from headrace.server.commands import iobench

                return iobench.main(arguments)
            case ["checksum", *arguments]:
                from headrace.server import checksum

                return checksum.main(arguments)
            case ["--version"]:
                print(f"headrace {_version()}")
                return OK
            case ["-h" | "--help"]:
                print(USAGE, end="")
                return OK
            case _:
                print(USAGE, end="", file=sys.stderr)
                return WRONG_USAGE
    except SettingsError as error:
        return _failed(error, WRONG_USAGE)
    except EngineError as error:
        return _failed(error, CANT_SERVE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who read our output has left: what is still buffered must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def serve() -> int:
    """Run `headrace serve` with the process's arguments; return its exit status."""
    return main(["serve", *sys.argv[1:]])


def _serve(arguments: Sequence[str]) -> int:
    """Serve until a signal comes; models are checked before the port is taken."""
    loaded = load(arguments, os.environ)
    if loaded.show_config:
        print(describe(loaded), _derived(loaded.settings), sep="\n")
        return OK
    if not loaded.models:
        raise SettingsError("no model is given, expected the path of a GGUF file")
    is_coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    log.configure(loaded.settings.log_level, is_coloured=is_coloured)
    library = Library(loaded.models, read_template(loaded.settings.chat_template_file))
    try:
        listener = _listen(loaded.settings.host, loaded.settings.port)
    except OSError as error:
        where = f"{loaded.settings.host} port {loaded.settings.port}"
        return _failed(f"can't listen on {where}: {_reason(error)}", CANT_SERVE)
    if loaded.settings.measure == "once":
        _measure(library, loaded.settings.threads)
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        failure = runner.run(_run(loaded, library, listener))
    return OK if failure is None else _failed(failure, CANT_SERVE)


def _measure(library: Library, n_threads: int) -> None:
    """Have what is not known yet of the machine measured; clients wait until that is done."""
    started = time.monotonic()
    measured: list[str] = []

    def note(what: str) -> None:
        if not measured:
            logger.info("measures this machine, once; --measure never goes without")
        measured.append(what)

    for model in library.models:
        largest = max(model.header.files, key=lambda file: file.n_bytes)
        types = weight_types(model.header)
        try:
            measured_profile(
                this_machine(), types, largest.path, n_threads=n_threads, progress=note
            )
        except EngineError as error:
            logger.warning("this machine can't be measured: %s", error)
    if measured:
        seconds = time.monotonic() - started
        logger.info("measured it in %.0f s; `headrace profile` shows it", seconds)


async def _run(loaded: Loaded, library: Library, listener: socket.socket) -> EngineError | None:
    models = Models(library, loaded.settings, partial(plan_load, topology=this_machine()))
    first = next(model for model in library.models if model.path == loaded.models[0])
    url = app.url_of(listener)
    logger.info("headrace %s listens on %s and loads %s", _version(), url, first.name)
    return await app.serve(loaded.settings, models, listener, first)


def _derived(settings: Settings) -> str:
    """Return what is made of the settings and the machine, as --show-config prints it."""
    topology = this_machine()
    n_threads = settings.threads or topology.default_threads
    lines = [f"compute threads = {n_threads} (of {len(topology.cpus)} CPUs)"]
    for name, value in installed_environment().items():
        known = os.environ.get(name)
        source = "environment" if known else "set in the engine process for llama.cpp's OpenMP"
        lines.append(f"{name} = {known or value} ({source})")
    return "\n".join(lines)


def _version() -> str:
    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on host and port; of several addresses, the first IPv4 one.

    Raises:
        OSError: the name has no address, or the port can't be had.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    family, _, _, _, address = found[0]
    takes_both = address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=takes_both
    )


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno is None:
        return str(error.strerror or error)
    return os.strerror(error.errno)


def _failed(error: EngineError | SettingsError | str, status: int) -> int:
    print(f"headrace: error: {error}", file=sys.stderr)
    return status
