"""The options object: types, ranges, and what the engine is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.errors import InvalidRequest
from headrace.engine.messages import SamplingParams
from headrace.server.options import INT32_MAX, Options, number, parse


def test_no_options_are_the_defaults() -> None:
    assert parse({}) == Options()


def test_every_option_reaches_the_engine() -> None:
    given = {
        "num_ctx": 2048,
        "num_predict": 5,
        "num_keep": 7,
        "stop": ["a", "b"],
        "seed": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.6,
        "min_p": 0.1,
        "typical_p": 0.7,
        "repeat_last_n": 32,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
    }
    sampling = SamplingParams(
        seed=3,
        temperature=0.5,
        top_k=4,
        top_p=0.6,
        min_p=0.1,
        typical_p=0.7,
        repeat_last_n=32,
        repeat_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
    )
    expected = Options(sampling=sampling, n_predict=5, n_keep=7, n_ctx=2048, stop=("a", "b"))
    assert parse(given) == expected


def test_unknown_null_and_placement_options_change_nothing() -> None:
    given = {"mirostat": 1, "nosuch": {}, "temperature": None, "stop": None, "use_mmap": True}
    given |= {"num_thread": 100_000, "num_gpu": -1, "num_batch": 0, "main_gpu": 1}
    assert parse(given) == Options()


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"num_predict": "5"}, 'option "num_predict" must be of type integer'),
        ({"num_ctx": True}, 'option "num_ctx" must be of type integer'),
        ({"num_thread": []}, 'option "num_thread" must be of type integer'),
        ({"temperature": "0.5"}, 'option "temperature" must be of type float32'),
        ({"top_p": False}, 'option "top_p" must be of type float32'),
        ({"use_mmap": "yes"}, 'option "use_mmap" must be of type boolean'),
        ({"use_mmap": 1}, 'option "use_mmap" must be of type boolean'),
        ({"stop": 1}, 'option "stop" must be of type array'),
        ({"stop": ["a", 1]}, 'option "stop" must be of an array of strings'),
    ],
)
def test_wrong_type_is_refused_by_name(option: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(option)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("given", "n_predict"),
    [(0, 0), (-1, -1), (-2, -2), (-9, -2), (3.7, 3), (1e9, 10**9), (1e300, INT32_MAX)],
)
def test_num_predict_loses_its_fraction_and_stays_in_range(given: float, n_predict: int) -> None:
    assert parse({"num_predict": given}).n_predict == n_predict


@pytest.mark.parametrize(
    ("given", "n_ctx"), [(0, 0), (-5, 0), (4096.9, 4096), (2**32 + 1, INT32_MAX)]
)
def test_num_ctx_stays_in_range(given: float, n_ctx: int) -> None:
    assert parse({"num_ctx": given}).n_ctx == n_ctx


@pytest.mark.parametrize(
    ("key", "given", "used"),
    [
        ("temperature", -1, 0),
        ("temperature", 1e9, 1e6),
        ("top_k", -1, 0),
        ("top_p", 2, 1),
        ("min_p", 2, 1),
        ("typical_p", -1, 0),
        ("repeat_penalty", 0, 1e-3),
        ("repeat_last_n", -9, -1),
        ("repeat_last_n", 0, 0),
        ("presence_penalty", -1e39, -1e3),
    ],
)
def test_number_out_of_range_becomes_the_nearest_in_it(key: str, given: float, used: float) -> None:
    assert getattr(parse({key: given}).sampling, key) == used


@pytest.mark.parametrize(
    ("given", "seed"), [(-1, -1), (-7, -1), (0, 0), (2**32 + 5, 5), (2**40, 0), (1.9, 1)]
)
def test_seed_wraps_at_32_bits_and_negative_is_random(given: float, seed: int) -> None:
    assert parse({"seed": given}).sampling.seed == seed


def test_bare_stop_string_counts_as_a_list_and_empty_ones_go() -> None:
    assert parse({"stop": "x"}).stop == ("x",)
    assert parse({"stop": ["", "x"]}).stop == ("x",)


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("-1", -1), ("0.5", 0.5), ("2.0", 2)])
def test_number_is_read_from_text(text: str, value: float) -> None:
    assert number(text) == value


@pytest.mark.parametrize("text", ["", "x", "1,5", "nan", "inf", "-Infinity"])
def test_text_that_is_no_number_of_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="could not"):
        number(text)
