"""Cache files: whole or not at all, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine.cache_files import cache_folder, write_atomically


def test_folder_is_below_the_user_s_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "headrace"
    assert not cache_folder().exists()


def test_file_holds_what_was_written_last_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    for data in (b"first, and long", b"second"):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert list(path.parent.iterdir()) == [path]


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    with path.open("rb") as file:
        write_atomically(path, b"new")
        assert file.read() == b"old"


def test_folder_that_can_t_be_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / "folder" / "a.json"
    write_atomically(path, b"data")
    assert caplog.messages == [f"{path}: can't be written: not a directory"]


def test_failed_write_leaves_what_was_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.json"
    path.mkdir()  # a file can't replace it
    write_atomically(path, b"data")
    assert caplog.messages == [f"{path}: can't be written: is a directory"]
    assert list(tmp_path.iterdir()) == [path]
