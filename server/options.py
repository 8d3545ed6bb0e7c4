"""The `options` object of a request: comes in a JSON object, goes out what the engine is asked for.

Unknown options are ignored, null is "not given", a number for an integer option loses its fraction,
and a value of another type is refused with status 400 (the reference server sends the same text
with 500). A number outside an option's range is moved to the nearest end of the range: this is the
one rule for all of them, and TABLE has all ranges. So top_k <= 0 is off, temperature <= 0 is
greedy, num_ctx <= 0 is the default, and nothing overflows in C. Two meanings that are ours to fix:
num_predict 0 generates nothing (as in llama.cpp), and a bare string is accepted for stop.
Knows nothing of the loaded model: the engine lowers num_ctx to what the model was trained for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import convert

from headrace.engine.errors import InvalidRequest
from headrace.engine.messages import SamplingParams

logger = logging.getLogger(__name__)

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Number:
    """A numeric option: what it is called in errors, and the range that values are moved into."""

    kind: str
    low: float
    high: float

    def read(self, key: str, value: object) -> int | float:
        """Return value moved into the range; raises InvalidRequest if it is no number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f'option "{key}" must be of type {self.kind}')
        in_range = min(max(value, self.low), self.high)
        return int(in_range) if self.kind == "integer" else float(in_range)


# Sampling options of SamplingParams; a repeat_penalty of 0 would divide by zero.
SAMPLING: dict[str, Number] = {
    "temperature": Number("float32", 0, 1e6),
    "top_k": Number("integer", 0, INT32_MAX),
    "top_p": Number("float32", 0, 1),
    "min_p": Number("float32", 0, 1),
    "typical_p": Number("float32", 0, 1),
    "repeat_last_n": Number("integer", -1, INT32_MAX),
    "repeat_penalty": Number("float32", 1e-3, 1e3),
    "presence_penalty": Number("float32", -1e3, 1e3),
    "frequency_penalty": Number("float32", -1e3, 1e3),
}
# Options of the request itself, and its seed, which wraps around instead.
REQUEST: dict[str, Number] = {
    "num_predict": Number("integer", -2, INT32_MAX),
    "num_keep": Number("integer", -1, INT32_MAX),
    "num_ctx": Number("integer", 0, INT32_MAX),
    "seed": Number("integer", -1, float(2**63)),
}
# How the model is placed is decided once, at start; checked as the reference does, then ignored.
PLACEMENT: dict[str, Number] = {
    key: Number("integer", -INT32_MAX, INT32_MAX)
    for key in ("num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict")
}
TABLE = SAMPLING | REQUEST | PLACEMENT


@dataclass(frozen=True, slots=True)
class Options:
    """What a request's options ask of the engine; the fields are those of Generate."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    n_predict: int = -1
    n_keep: int = 4
    n_ctx: int = 0
    stop: tuple[str, ...] = ()


def parse(options: Mapping[str, object]) -> Options:
    """Return options checked, in range and with defaults filled in.

    Raises:
        InvalidRequest: a known option has a value of another type.
    """
    given = {key: value for key, value in options.items() if value is not None}
    numbers = {key: TABLE[key].read(key, value) for key, value in given.items() if key in TABLE}
    if not isinstance(given.get("use_mmap", False), bool):
        raise InvalidRequest('option "use_mmap" must be of type boolean')
    unknown = given.keys() - TABLE.keys() - {"use_mmap", "stop"}
    if unknown:
        logger.debug("ignoring unknown options: %s", ", ".join(sorted(unknown)))
    sampling = {key: value for key, value in numbers.items() if key in SAMPLING}
    return Options(
        sampling=convert(sampling | {"seed": _seed(numbers.get("seed", -1))}, SamplingParams),
        n_predict=int(numbers.get("num_predict", -1)),
        n_keep=int(numbers.get("num_keep", 4)),
        n_ctx=int(numbers.get("num_ctx", 0)),
        stop=_stop(given.get("stop")),
    )


def number(text: str) -> int | float:
    """Return the number that text spells, as JSON would have it.

    Raises:
        ValueError: text is no number, or one that JSON has not.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"could not take {text!r}, expected a finite number")
    return int(value) if value.is_integer() else value


def _seed(seed: float) -> int:
    return -1 if seed < 0 else int(seed) % 2**32


def _stop(value: object) -> tuple[str, ...]:
    """Return the stop strings; an empty one, found in any text, is dropped."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise InvalidRequest('option "stop" must be of type array')
    if not all(isinstance(text, str) for text in value):
        raise InvalidRequest('option "stop" must be of an array of strings')
    return tuple(text for text in value if text)
