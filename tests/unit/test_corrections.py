"""Corrections of forecasts as files: which are read again, and which are not."""

from __future__ import annotations

from pathlib import Path

import header_only
import pytest

from headrace.engine.corrections import corrections_path, keep_correction, read_corrections
from headrace.engine.forecast import Correction
from headrace.engine.gguf import Header, read_model

KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def header(tmp_path: Path) -> Header:
    return read_model(header_only.build(header_only.QWEN3_30B, tmp_path))


def test_each_mode_has_a_correction_of_its_own(header: Header) -> None:
    assert read_corrections(header, KEY) == {}
    keep_correction(header, KEY, "expert-streaming", Correction(0.5))
    keep_correction(header, KEY, "full-resident", Correction(1.25))
    keep_correction(header, KEY, "expert-streaming", Correction(0.75))
    assert read_corrections(header, KEY) == {
        "expert-streaming": Correction(0.75), "full-resident": Correction(1.25),
    }  # fmt: skip


def test_another_model_has_none(header: Header, tmp_path: Path) -> None:
    keep_correction(header, KEY, "full-resident", Correction(0.5))
    other = read_model(header_only.build(header_only.MIXTRAL, tmp_path))
    assert read_corrections(other, KEY) == {}


def test_corrections_of_another_profile_are_forgotten(header: Header) -> None:
    keep_correction(header, KEY, "expert-streaming", Correction(0.5))
    assert read_corrections(header, "f" * 16) == {}
    keep_correction(header, "f" * 16, "full-resident", Correction(2.0))
    assert read_corrections(header, "f" * 16) == {"full-resident": Correction(2.0)}


@pytest.mark.parametrize("data", [b"", b"{", b'{"version": 1}', b"null"])
def test_file_that_can_t_be_read_is_said(
    data: bytes, header: Header, caplog: pytest.LogCaptureFixture
) -> None:
    keep_correction(header, KEY, "full-resident", Correction(0.5))
    corrections_path(header).write_bytes(data)
    assert read_corrections(header, KEY) == {}
    [message] = caplog.messages
    assert message.startswith(f"{corrections_path(header)}: can't be read")
