"""The OpenMP library that llama.cpp links to decides how waiting threads are told to spin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engine.openmp import GOMP_SPINS, KMP_BLOCK_MS, openmp_environment

GOMP = {"GOMP_SPINCOUNT": str(GOMP_SPINS)}
KMP = {"KMP_BLOCKTIME": str(KMP_BLOCK_MS)}


@pytest.mark.parametrize(
    ("file", "linked", "variables"),
    [
        ("libggml-cpu.so", b"libgomp.so.1", GOMP),
        ("libggml-cpu-haswell.so", b"libgomp-24e2ab19.so.1.0.0", GOMP),
        ("libggml-cpu.dylib", b"@rpath/libomp.dylib", KMP),
        ("ggml-cpu.dll", b"libiomp5md.dll", KMP),
        ("libggml-cpu.so", b"libpthread.so.0", {}),
        ("libggml-base.so", b"libgomp.so.1", {}),
    ],
)
def test_the_linked_library_decides(
    tmp_path: Path, file: str, linked: bytes, variables: dict[str, str]
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / file).write_bytes(b"\x7fELF\0" + linked + b"\0")
    assert openmp_environment(tmp_path) == variables


def test_a_package_without_libraries_needs_nothing(tmp_path: Path) -> None:
    assert openmp_environment(tmp_path) == {}


def test_the_installed_library_is_found_without_loading_it() -> None:
    code = (
        "import sys; from headrace.engine.openmp import installed_environment;"
        "installed_environment(); assert 'llama_cpp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
