"""TTFT of the second turn of a 2,000-token chat, as a share of the first turn's.

Timed from sending the request to the first line with text. Loading is outside. Wanted: at most 0.1.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from reporting import report, smollm2
from serving import serve, stream, text_of

N_RUNS = 5


def main() -> None:
    firsts, seconds, ratios = [], [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(smollm2(), Path(folder, "log"), "--context", "4096") as server,
    ):
        name = server.names()[0]
        for run in range(N_RUNS):
            # Other words in every run, or the prefix of the last run would be found.
            text = f"Story {run}. " + " ".join(f"Line {i} of story {run}." for i in range(220))
            messages = [{"role": "user", "content": text}]
            first, answer, n_prompt = ask(server.url, name, messages)
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "And what came next?"},
            ]
            second, _, _ = ask(server.url, name, messages)
            firsts.append(first)
            seconds.append(second)
            ratios.append(second / first)
    report("TTFT of the first turn", firsts, "s", n_prompt=n_prompt)
    report("TTFT of the second turn", seconds, "s")
    report("TTFT, second turn / first turn", ratios, "ratio", wanted=0.1)


def ask(url: str, name: str, messages: list[dict[str, Any]]) -> tuple[float, str, int]:
    """Return the seconds to the first text, the answer, and the tokens of the prompt."""
    body = {
        "model": name,
        "messages": messages,
        "options": {"temperature": 0, "num_predict": 24},
    }
    started = time.monotonic()
    records = stream(url, "/api/chat", body)
    first = next(r.at for r in records if r.data["message"]["content"])
    return first - started, text_of(records), records[-1].data["prompt_eval_count"]


if __name__ == "__main__":
    main()
