"""The settings of headrace: one table of field, flag, environment variable, default and meaning.

Comes in: the command line, the environment and a TOML file. Goes out: frozen Settings, the source
of each, and the table as --help, the README and --show-config print it. Knows no other part of
headrace. The caller hands the environment over; nothing else reads it.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from headrace.config.units import format_duration, parse_bytes, parse_duration

T = TypeVar("T")

_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_LISTEN = re.compile(r"(\[.*\]|[^:]*)(?::([0-9]+))?")
# Ollama, envconfig.Host: the port of an OLLAMA_HOST that names none, by its scheme
_SCHEME_PORTS = {"": "11434", "http": "80", "https": "443"}
_ORIGIN = re.compile(r".*\*.*|[a-z][a-z0-9+.-]*://[^/]+", re.IGNORECASE)


class SettingsError(ValueError):
    """A setting is wrong; the message names source, key, value and what was expected."""


@dataclass(frozen=True, slots=True)
class _Kind(Generic[T]):
    """How a value is read; parse takes text, or what TOML has made of it, and raises ValueError."""

    parse: Callable[[object], T]
    expected: str


def _whole(low: int, high: int) -> _Kind[int]:
    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError
        return value

    return _Kind(parse, f"a whole number from {low} to {high}")


def _choice(names: str) -> _Kind[str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in names.split():
            raise ValueError
        return value.lower()

    return _Kind(parse, f"one of {', '.join(names.split())}")


def _parse_keep_alive(value: object) -> float:
    if not isinstance(value, str | int | float):
        raise ValueError
    return parse_duration(value)


def _parse_host(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    if value.startswith("[") and value.endswith("]"):
        return str(ipaddress.IPv6Address(value[1:-1]))
    if ":" in value:
        return str(ipaddress.IPv6Address(value))
    if not _HOST_NAME.fullmatch(value):
        raise ValueError
    return value


def _parse_listen(value: object) -> tuple[str, int]:
    """Return host and port of an OLLAMA_HOST; a path after them has no meaning for a server.

    Without host (":1234") it is every IPv4 address. Unlike in Ollama a wrong port is an error.
    """
    scheme, separator, rest = str(value).rpartition("://")
    if scheme not in _SCHEME_PORTS or (separator and not scheme):
        raise ValueError
    address = rest.partition("/")[0]
    match = _LISTEN.fullmatch(address)
    host, port = match.groups() if match else (address, None)  # an IPv6 address without brackets
    if not host and port:
        host = "0.0.0.0"
    return _parse_host(host), _PORT.parse(port or _SCHEME_PORTS[scheme])


def _parse_memory(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError
    return parse_bytes(str(value))


def _parse_path(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError
    return value


def _parse_origins(value: object) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError
    origins = tuple(item.strip() for item in items if item.strip())
    if not all(_ORIGIN.fullmatch(origin) for origin in origins):
        raise ValueError
    return origins


_HOST = _Kind(_parse_host, "a host name or an IP address")
_PORT = _whole(0, 65535)
_LISTEN_FORMS = "host, host:port, :port or http://host:port with a port up to 65535"
_LISTEN_HOST = _Kind(lambda value: _parse_listen(value)[0], _LISTEN_FORMS)
_LISTEN_PORT = _Kind(lambda value: _parse_listen(value)[1], _LISTEN_FORMS)
_KEEP_ALIVE = _Kind(_parse_keep_alive, 'a duration such as "10m" or "1h30m", or seconds')
_ORIGINS = _Kind(_parse_origins, 'comma-separated "*", patterns with * or scheme://host[:port]')
_PATH = _Kind(_parse_path, "the path of a file")
_KV_CACHE_TYPE = _choice("f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl")
_MEMORY = _Kind(_parse_memory, 'bytes or a size such as "3GiB"')
_VRAM = _Kind(
    lambda value: None if value == "" else _parse_memory(value), 'bytes or a size such as "8GiB"'
)
_MODE = _choice("auto full-resident expert-streaming dense-ffn-streaming")
_MEASURE = _choice("once never")
_LOG_LEVEL = _choice("debug info warning error")
_PARALLEL = _whole(0, 128)  # llama-cparams.h, LLAMA_MAX_SEQ: 256 sequences, some for idle ones
_THREADS = _whole(0, 512)  # ggml.h, GGML_MAX_N_THREADS
_COUNT = _whole(1, 2**31 - 1)
_CONTEXT = _whole(0, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class _Row:
    """What the table says about one field; its key in a file is the field's name."""

    kind: _Kind[Any]
    default: str
    doc: str
    environment: str
    environment_kind: _Kind[Any]

    @property
    def meaning(self) -> str:
        return f"{self.doc}: {self.kind.expected}"


def _setting(
    kind: _Kind[T],
    default: str,
    doc: str,
    environment: str = "",
    environment_kind: _Kind[T] | None = None,
) -> T:
    """Return the dataclass field of one setting; default is written as it would be in a flag."""
    row = _Row(kind, default, doc, environment, environment_kind or kind)
    made: T = field(default=kind.parse(default), metadata={"row": row})
    return made


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective settings; keep_alive is in seconds, and math.inf is forever."""

    host: str = _setting(
        _HOST, "127.0.0.1", "where the server listens", "OLLAMA_HOST", _LISTEN_HOST
    )
    port: int = _setting(
        _PORT, "8080", "where the server listens, 0 for a free port", "OLLAMA_HOST", _LISTEN_PORT
    )
    context: int = _setting(
        _CONTEXT, "0", "context of a slot in tokens, 0 for 4096 or what of it fits",
        "OLLAMA_CONTEXT_LENGTH",
    )  # fmt: skip
    parallel: int = _setting(
        _PARALLEL, "0", "requests that one model answers at once, 0 for 4", "OLLAMA_NUM_PARALLEL"
    )
    memory: int = _setting(
        _MEMORY, "0", "memory that the process of a model may take, 0 for what is available"
    )
    vram: int | None = _setting(
        _VRAM, "", "memory of a GPU for a model, 0 for no GPU, none for what is free"
    )
    mode: str = _setting(_MODE, "auto", "what of a model stays in memory")
    threads: int = _setting(
        _THREADS, "0", "compute threads, 0 for one per physical performance core"
    )
    keep_alive: float = _setting(
        _KEEP_ALIVE, "5m", "how long an idle model stays, -1 forever", "OLLAMA_KEEP_ALIVE"
    )
    max_queue: int = _setting(_COUNT, "512", "requests that may wait", "OLLAMA_MAX_QUEUE")
    kv_cache_type: str = _setting(
        _KV_CACHE_TYPE, "f16", "type of keys and values in the KV cache", "OLLAMA_KV_CACHE_TYPE"
    )
    chat_template_file: str = _setting(
        _PATH, "", "Jinja template used instead of the one in the model file"
    )
    origins: tuple[str, ...] = _setting(
        _ORIGINS, "", "browser origins allowed besides the local ones", "OLLAMA_ORIGINS"
    )
    log_level: str = _setting(_LOG_LEVEL, "info", "least severe message that is logged")
    measure: str = _setting(
        _MEASURE, "once", "when the machine is measured for plans and forecasts"
    )


_TABLE: dict[str, _Row] = {entry.name: entry.metadata["row"] for entry in fields(Settings)}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a command line asked for; a source is "flag", "environment X", "file X" or "default"."""

    settings: Settings
    sources: Mapping[str, str]
    models: tuple[Path, ...]
    show_config: bool


def load(
    argv: Sequence[str], environ: Mapping[str, str], *, prog: str = "headrace serve"
) -> Loaded:
    """Return the settings of argv, else of environ, else of the file, else the defaults.

    Text of argv and environ is trimmed of spaces and quotes, and a variable that is then empty
    counts as not set. Of several sources of a setting only the first is judged. --help prints
    and raises SystemExit(0).

    Raises:
        SettingsError: an unknown flag or key, a value that is not what the setting expects, or a
            file that can't be read; the caller prints it and exits with status 2.
    """
    parser = FlagParser(prog, "[flags] [MODEL ...]")
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="a GGUF file")
    parser.add_settings(_TABLE)
    parser.add_argument(
        "--show-config", action="store_true", help="print each setting with its source, and exit"
    )
    arguments = vars(parser.parse_intermixed_args(argv))
    settings, sources = resolve(arguments, environ)
    return Loaded(settings, sources, tuple(arguments["models"]), arguments["show_config"])


def resolve(
    arguments: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Settings, dict[str, str]]:
    """Return the settings of parsed arguments, environ and file, and the source of each.

    A setting whose flag the parser did not have keeps its default, whatever other sources say.

    Raises:
        SettingsError: as load does.
    """
    path = arguments["config"] or _default_file(environ)
    content = _read_file(path) if path else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, row in _TABLE.items():
        kind, value, source = row.kind, row.default, "default"
        if key not in arguments:
            pass  # this command does not have it
        elif arguments[key] is not None:
            value, source = _trimmed(arguments[key]), "flag"
        elif row.environment and _trimmed(environ.get(row.environment, "")):
            kind, value = row.environment_kind, _trimmed(environ[row.environment])
            source = f"environment {row.environment}"
        elif key in content:
            value, source = content[key], f"file {path}"
        values[key], sources[key] = _parsed(kind, value, key, source), source
    return Settings(**values), sources


def describe(loaded: Loaded) -> str:
    """Return what --show-config prints: a line "field = value (source)" for each setting."""
    return "\n".join(
        f"{key} = {_shown(getattr(loaded.settings, key))} ({source})"
        for key, source in loaded.sources.items()
    )


def markdown_table() -> str:
    """Return the README's table of settings."""
    lines = [
        "| key in the file | flag | environment | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for key, row in _TABLE.items():
        cells = [f"`{text}`" if text else "" for text in (key, _flag(key), row.environment)]
        cells += [f"`{row.default}`" if row.default else "none", row.meaning.replace("*", "\\*")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _trimmed(text: str) -> str:
    # Ollama, envconfig.Var
    return text.strip().strip("\"'")


def _shown(value: object) -> str:
    match value:
        case float():  # the only setting that is not whole is a duration
            return format_duration(value)
        case tuple():
            return ",".join(value) or "none"
        case None:
            return "none"
        case _:
            return str(value) or "none"


def _parsed(kind: _Kind[T], value: object, key: str, source: str) -> T:
    try:
        return kind.parse(value)
    except ValueError as error:
        raise SettingsError(f"{source}: {key} is {value!r}, expected {kind.expected}") from error


def _default_file(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the user's settings file, if there is one.

    Source: XDG Base Directory Specification; a relative XDG_CONFIG_HOME counts as not set.
    """
    folder = Path(environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():
        folder = Path(environ.get("HOME", "")) / ".config"
    path = folder / "headrace" / "config.toml"
    # Unlike Path.exists it is false, not an error, in a home that may not be searched.
    return path if path.is_absolute() and os.path.exists(path) else None


def _read_file(path: Path) -> dict[str, Any]:
    """Return the keys and values of the TOML file at path, each key a setting."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"file {path}: {error.strerror}, expected a TOML file") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise SettingsError(f"file {path}: {error}, expected a TOML file") from error
    for key, value in content.items():
        if key not in _TABLE:
            raise SettingsError(
                f"file {path}: unknown key {key} = {value!r}, expected {', '.join(_TABLE)}"
            )
    return content


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that raises its errors, so that all errors of settings look alike."""

    def __init__(self, prog: str, usage: str, description: str | None = None) -> None:
        """Make the parser of the command prog; usage is what may follow it."""
        super().__init__(
            prog=prog,
            usage=f"%(prog)s {usage}",
            description=description,
            allow_abbrev=False,
            epilog="A flag goes before an environment variable, that before the file.",
        )

    def add_settings(self, keys: Iterable[str]) -> None:
        """Add the flags of the settings keys, and the one of the file that holds them."""
        for key in keys:
            row = _TABLE[key]
            environment = f", environment {row.environment}" if row.environment else ""
            summary = f"{row.meaning} (default {row.default or 'none'}{environment})"
            self.add_argument(_flag(key), metavar="VALUE", help=summary)
        self.add_argument(
            "--config",
            metavar="PATH",
            type=Path,
            help="TOML file of these settings, each key a flag's name with _ for -"
            " (default $XDG_CONFIG_HOME/headrace/config.toml, if it exists)",
        )

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"flag: {message}; {self.prog} --help lists the flags")
