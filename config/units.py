"""Sizes and durations as people write them.

Comes in: the text of a flag, a variable, a file or a request. Goes out: bytes as int, seconds as
float, and readable text for both. Knows no setting.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)")
_SIZE_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SIZE_FACTORS[_letter] = _SIZE_FACTORS[f"{_letter}ib"] = 1024**_power
    _SIZE_FACTORS[f"{_letter}b"] = 1000**_power
_LARGEST_SIZE = 2**63 - 1  # off_t, ssize_t and every size that Ollama's API carries

_PLAIN_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
# Go, package time, ParseDuration: a sign, then numbers each with a unit
_GO_PART = re.compile(r"([0-9]*\.?[0-9]*)([^0-9.]*)")
_GO_UNITS_NS = {
    "ns": 1,
    "us": 10**3,
    "\u00b5s": 10**3,  # micro sign
    "\u03bcs": 10**3,  # Greek small letter mu
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
# Go's longest duration, 292 years; what is longer (or would overflow there) is forever
_LONGEST_S = (2**63 - 1) / 1e9
_DURATION_EXPECTED = 'expected seconds or a duration such as "10m", "1h30m" or "300ms"'


def parse_bytes(text: str) -> int:
    """Return the bytes that text stands for: a number with an optional unit, in any case.

    K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB are powers of 1000. A
    fraction of a byte is dropped.

    Raises:
        ValueError: text is not a size, is negative, or is 8 EiB or more.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    factor = _SIZE_FACTORS.get(match[2]) if match else None
    n_bytes = int(Fraction(match[1]) * factor) if match and factor else -1
    if not 0 <= n_bytes <= _LARGEST_SIZE:
        raise ValueError(
            f'invalid size "{text}", expected bytes or a size below 8 EiB such as "512M", "4GiB"'
        )
    return n_bytes


def format_bytes(n_bytes: int) -> str:
    """Return n_bytes in the largest binary unit that it fills, to two decimals: "3.5 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _SIZE_FACTORS[unit.lower()]
        if n_bytes >= factor:
            return f"{_decimal(n_bytes / factor, 2)} {unit}"
    return f"{n_bytes} B"


def format_figure(number: float) -> str:
    """Return number to three digits, or to the whole from 100 on; never with an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def parse_duration(value: str | float) -> float:
    """Return the seconds that value stands for; math.inf, forever, if it is negative.

    A number is seconds, in quotes too (Go and Ollama's requests refuse a quoted number without
    unit); other text is a Go duration. From 292 years on, the longest that Go can hold, it is
    forever as well.

    Raises:
        ValueError: value is not a duration; the message starts with Go's words.
    """
    if isinstance(value, str):
        text = value.strip()
        seconds = float(text) if _PLAIN_NUMBER.fullmatch(text) else _go_seconds(text)
    elif isinstance(value, bool) or value != value:  # true, or not a number
        raise ValueError(f"invalid duration {value}, {_DURATION_EXPECTED}")
    else:
        seconds = value
    # Compared before it becomes a float: an int may be too large for one.
    return math.inf if seconds < 0 or seconds >= _LONGEST_S else abs(float(seconds))


def format_duration(seconds: float) -> str:
    """Return seconds, not negative, to the microsecond: "1h30m", "0.3s"; math.inf is "forever"."""
    if math.isinf(seconds):
        return "forever"
    minutes, rest_s = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    amounts = {"h": str(hours), "m": str(minutes), "s": _decimal(rest_s, 6)}
    return "".join(f"{text}{unit}" for unit, text in amounts.items() if text != "0") or "0s"


def _decimal(number: float, n_digits: int) -> str:
    return f"{number:.{n_digits}f}".rstrip("0").rstrip(".")


def _go_seconds(text: str) -> float:
    """Return the seconds of a Go duration with its sign; errors are Go's.

    Source: Go, package time, ParseDuration and its grammar.
    """
    rest = text[1:] if text.startswith(("-", "+")) else text
    if not rest:
        raise _go_error("invalid duration", text)
    total_ns = 0.0
    while rest:
        part = _GO_PART.match(rest)
        assert part, "the pattern matches any text"
        number, unit = part.groups()
        if number in ("", "."):
            raise _go_error("invalid duration", text)
        if not unit:
            raise _go_error("missing unit in duration", text)
        if unit not in _GO_UNITS_NS:
            raise _go_error(f"unknown unit {_go_quote(unit)} in duration", text)
        total_ns += float(number) * _GO_UNITS_NS[unit]
        rest = rest[part.end() :]
    return total_ns / (-1e9 if text.startswith("-") else 1e9)


def _go_error(problem: str, text: str) -> ValueError:
    return ValueError(f"time: {problem} {_go_quote(text)}, {_DURATION_EXPECTED}")


def _go_quote(text: str) -> str:
    """Return text quoted as Go's time package does: bytes outside printable ASCII as \\x."""
    quoted = ""
    for byte in text.encode(errors="surrogatepass"):
        if byte < 0x20 or byte >= 0x80:
            quoted += f"\\x{byte:02x}"
        else:
            quoted += f"\\{byte:c}" if byte in b'"\\' else f"{byte:c}"
    return f'"{quoted}"'
