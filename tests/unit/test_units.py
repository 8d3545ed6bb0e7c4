"""Sizes and durations: what people write, and Go's words for what they may not write."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.units import (
    format_bytes,
    format_duration,
    format_figure,
    parse_bytes,
    parse_duration,
)

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("64K", 64 * KIB),
        ("512M", 512 * MIB),
        ("3072MiB", 3 * GIB),
        ("4GiB", 4 * GIB),
        ("4g", 4 * GIB),
        ("4 GiB", 4 * GIB),
        (" 1.5GiB ", 3 * GIB // 2),
        ("2T", 2 * TIB),
        ("4GB", 4_000_000_000),
        ("0.1K", 102),
        ("9007199254740993", 2**53 + 1),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_size_is_read_in_bytes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "-1GiB",
        "+1",
        "1e9",
        "1_000",
        "1,5G",
        "1.G",
        "4GiBs",
        "4 G B",
        "4P",
        "\u0664",
        "inf",
        "nan",
        "8388608T",
        "9223372036854775808",
        "9" * 5000,
    ],
)
def test_size_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="expected bytes or a size") as caught:
        parse_bytes(text)
    assert f'invalid size "{text}"' in str(caught.value)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 * GIB, "3 GiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (100 * MIB, "100 MiB"),
        (GIB - 1, "1024 MiB"),
        (GIB + MIB, "1 GiB"),
        (990 * GIB // 1000, "1013.76 MiB"),
        (5000 * TIB, "5000 TiB"),
    ],
)
def test_size_is_written_in_its_largest_unit(n_bytes: int, text: str) -> None:
    assert format_bytes(n_bytes) == text


@given(st.integers(min_value=0, max_value=2**62))
def test_written_size_is_read_back_within_its_two_decimals(n_bytes: int) -> None:
    assert parse_bytes(format_bytes(n_bytes)) == pytest.approx(n_bytes, rel=0.0051)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (300, 300.0),
        (10.5, 10.5),
        (0, 0.0),
        ("300", 300.0),
        ("1.5", 1.5),
        (" 3600 ", 3600.0),
        ("0", 0.0),
        ("10m", 600.0),
        ("1h30m", 5400.0),
        ("300ms", 0.3),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("1.s", 1.0),
        ("+5s", 5.0),
        ("100us", 1e-4),
        ("100\u00b5s", 1e-4),
        ("100\u03bcs", 1e-4),
        ("7ns", 7e-9),
        ("1h2m3.5s", 3723.5),
        ("24h", 86400.0),
    ],
)
def test_duration_is_read_in_seconds(value: str | float, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize("value", [-1, -0.001, "-1", "-1m", "-1h30m", "-1ns"])
def test_negative_duration_is_forever(value: str | float) -> None:
    assert parse_duration(value) == math.inf


@pytest.mark.parametrize(
    "value", [1e30, 10**400, math.inf, "1e30", "1e999", "9" * 5000, "9223372036.9s", "2562048h"]
)
def test_duration_that_go_can_not_hold_is_forever(value: str | float) -> None:
    assert parse_duration(value) == math.inf


@pytest.mark.parametrize("value", [-0.0, "-0", "-0s"])
def test_zero_with_a_sign_is_zero_and_not_forever(value: str | float) -> None:
    seconds = parse_duration(value)
    assert (seconds, math.copysign(1, seconds)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("abc", 'time: invalid duration "abc"'),
        ("", 'time: invalid duration ""'),
        ("-", 'time: invalid duration "-"'),
        (".", 'time: invalid duration "."'),
        (".s", 'time: invalid duration ".s"'),
        ("--1s", 'time: invalid duration "--1s"'),
        ("s5", 'time: invalid duration "s5"'),
        ("1h30", 'time: missing unit in duration "1h30"'),
        ("1.2.3s", 'time: missing unit in duration "1.2.3s"'),
        ("5d", 'time: unknown unit "d" in duration "5d"'),
        ("1h-5m", 'time: unknown unit "h-" in duration "1h-5m"'),
        ("1 m", 'time: unknown unit " m" in duration "1 m"'),
        ("5M", 'time: unknown unit "M" in duration "5M"'),
        ('a"\\', 'time: invalid duration "a\\"\\\\"'),
        ("\u00e9\x01", 'time: invalid duration "\\xc3\\xa9\\x01"'),
        ("\ud800", 'time: invalid duration "\\xed\\xa0\\x80"'),
    ],
)
def test_text_that_is_no_duration_is_refused_in_the_words_of_go(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="time: ") as caught:
        parse_duration(text)
    assert str(caught.value).startswith(f"{message}, expected seconds or a duration such as")


@pytest.mark.parametrize("value", [math.nan, True, False])
def test_number_that_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"invalid duration {value}, expected seconds"):
        parse_duration(value)


@given(st.text(alphabet="0123456789.+-eEhmsun\u00b5 ", max_size=12) | st.text(max_size=8))
def test_any_text_is_a_duration_of_zero_or_more_or_a_value_error(text: str) -> None:
    try:
        seconds = parse_duration(text)
    except ValueError:
        return
    assert seconds >= 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (300.0, "5m"),
        (5400.0, "1h30m"),
        (0.3, "0.3s"),
        (60.3, "1m0.3s"),
        (3723.5, "1h2m3.5s"),
        (86400.0, "24h"),
        (1e-9, "0s"),
        (math.inf, "forever"),
    ],
)
def test_duration_is_written_as_go_reads_it(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e9))
def test_written_duration_is_read_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-12, abs=1e-6)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.01234, "0.0123"), (2.0, "2"), (99.94, "99.9"), (100.4, "100"), (12345.6, "12,346")],
)
def test_figures_have_three_digits_or_no_fraction(number: float, text: str) -> None:
    assert format_figure(number) == text
