"""Trees of /proc and /sys as machines have them, for tests of what is read from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

TREES = Path(__file__).parent / "topologies"


@pytest.fixture
def unpack(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes the tree of that name, with changes, and returns its root."""

    def make(name: str = "", changes: Mapping[str, str] | None = None) -> Path:
        tree: dict[str, str] = json.loads((TREES / f"{name}.json").read_text()) if name else {}
        for path, content in {**tree, **(changes or {})}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content)
        return tmp_path

    return make
