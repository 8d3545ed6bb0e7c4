"""What llama.cpp's log says that nothing else of it does: why something failed, and what it took.

In: the lines of the log. Out: reasons, and the sizes of a context's buffers. Knows the words of the
pinned version, and calls nothing.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

_ERROR = 4  # of enum ggml_log_level
_N_REASONS = 8
_SIZE = r"size = +(\d+\.\d\d) MiB"
# llama-kv-cache.cpp, llama-kv-cache-dsv4.cpp and llama-memory-recurrent.cpp: a line for each part.
# The lines about its buffers are no good: there are none without memory.
_MEMORY = re.compile(rf"\w+: (?:.*, )?{_SIZE}(?: \(.*\).*)?")
# llama-context.cpp; a line for each device, and one for the logits.
_BUFFER = re.compile(rf"\w+: +\S+ +(compute|output) buffer {_SIZE}")


@dataclass(frozen=True, slots=True)
class ContextBytes:
    """What llama.cpp says that a context takes, rounded up to what its two decimals may hide."""

    memory_bytes: int
    """KV cache, and the states of recurrent layers."""
    compute_bytes: int
    """Activations of the largest batch, and masks for all cells."""
    output_bytes: int
    """Logits."""

    @property
    def n_bytes(self) -> int:
        return self.memory_bytes + self.compute_bytes + self.output_bytes


class LlamaLog:
    """The part of the log that belongs to the call at hand."""

    def __init__(self) -> None:
        self._errors: deque[str] = deque(maxlen=_N_REASONS)
        self._sizes: dict[str, list[int]] = {}

    def begin(self) -> None:
        """Forget what was said before: the next lines are of the next call."""
        self._errors.clear()
        self._sizes.clear()

    def hear(self, level: int, line: str) -> None:
        """Take a line without its end."""
        if level == _ERROR:
            self._errors.append(line)
        if match := _BUFFER.fullmatch(line):
            self._sizes.setdefault(match[1], []).append(_bytes(match[2]))
        elif match := _MEMORY.fullmatch(line):
            self._sizes.setdefault("memory", []).append(_bytes(match[1]))

    def reason(self, default: str) -> str:
        """Return llama.cpp's own words for what just failed, most specific first."""
        lines = [line.split(": ", 1)[-1] for line in self._errors]
        self._errors.clear()
        return lines[0] if lines else default

    def context_bytes(self) -> ContextBytes | None:
        """Return the sizes of the context that was made; None if not all were said."""
        if not self._sizes.keys() >= {"memory", "compute", "output"}:
            return None
        return ContextBytes(
            *(sum(self._sizes[what]) for what in ("memory", "compute", "output"))
        )  # fmt: skip


def _bytes(mib: str) -> int:
    """Return the most bytes that are mib, as llama.cpp rounds them."""
    return round((float(mib) + 0.005) * 2**20)
