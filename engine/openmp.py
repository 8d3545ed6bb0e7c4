"""How the waiting threads of llama.cpp's OpenMP library behave, as environment variables."""

from __future__ import annotations

import importlib.util
from pathlib import Path

# Spins of a waiting thread before it sleeps. Measured on 2 cores: with none (passive waiting)
# decode is up to three times slower; from 3,000, some 0.1 ms, it is as fast as with 3,000,000,
# both alone and while streaming. With one other busy process, each spin keeps the thread that is
# waited for from its core: 15 tokens/s with 3,000, under 3 with 30,000 and more.
GOMP_SPINS = 3_000
# The same for LLVM's and Intel's library: milliseconds of spinning before sleep, its least.
KMP_BLOCK_MS = 1


def openmp_environment(package: Path) -> dict[str, str]:
    """Return the variables for the OpenMP library that llama.cpp in folder package links to.

    They must be in the environment before that library is loaded; empty if it links to none.
    """
    for library in sorted((package / "lib").glob("*ggml-cpu*")):
        data = library.read_bytes()
        if b"libgomp" in data:
            return {"GOMP_SPINCOUNT": str(GOMP_SPINS)}
        if b"libomp" in data or b"libiomp5" in data:
            return {"KMP_BLOCKTIME": str(KMP_BLOCK_MS)}
    return {}


def installed_environment() -> dict[str, str]:
    """Return openmp_environment of the installed llama.cpp, without loading it."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return {}
    return openmp_environment(Path(spec.origin).parent)
