"""The JSON objects of an answer: comes in text and counts, goes out the bytes of one record.

The one place that knows where text goes in a record: `response` on /api/generate,
`message.content` on /api/chat. Splitting reasoning and tool calls off the text belongs here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import orjson

from headrace.engine.messages import Done, Logprob

Fields = dict[str, object]

# JSON has no infinity; this is what an impossible alternative gets.
LOWEST_LOGPROB = -9999.0


class Records:
    """Makes the records of one answer; the constant parts of a record are formatted once."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        """Take the model's name as the client spelt it; it comes back in every record."""
        self._head = b'{"model":' + orjson.dumps(model) + b',"created_at":"'
        self._before = (
            b'","message":{"role":"assistant","content":' if is_chat else b'","response":'
        )
        self._after = b"}" if is_chat else b""

    def chunk(self, text: str, logprobs: Sequence[Logprob] = ()) -> bytes:
        """Return the line of a piece of the answer."""
        if logprobs:
            return self.record(text, {"done": False, "logprobs": logprob_fields(logprobs)}) + b"\n"
        return b"%s%s%s%s%s%s" % (
            self._head,
            timestamp(),
            self._before,
            orjson.dumps(text),
            self._after,
            b',"done":false}\n',
        )

    def record(self, text: str, fields: Fields) -> bytes:
        """Return the object of text and fields (not empty), without a newline."""
        start = self._head + timestamp() + self._before + orjson.dumps(text) + self._after
        return start + b"," + orjson.dumps(fields)[1:]

    def ending(self, reason: str) -> bytes:
        """Return the object that answers a request without a prompt: reason is load or unload."""
        return self.record("", {"done": True, "done_reason": reason})

    def debug(self, rendered: str) -> bytes:
        """Return the object that shows the prompt instead of an answer."""
        return self.record(
            "", {"done": False, "_debug_info": {"rendered_template": rendered, "image_count": 0}}
        )


def timestamp() -> bytes:
    """Return this moment as RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat()[:-6].encode() + b"Z"


def final_fields(done: Done, total_ns: int, load_ns: int) -> Fields:
    """Return what the last record says about a finished generation; zeros are left out."""
    timings = done.timings
    numbers = {
        "total_duration": total_ns,
        "load_duration": load_ns,
        "prompt_eval_count": timings.n_prompt,
        "prompt_eval_cached_count": timings.n_cached,
        "prompt_eval_duration": timings.prefill_ns,
        "eval_count": timings.n_generated,
        "eval_duration": timings.decode_ns,
    }
    fields: Fields = {"done": True, "done_reason": done.reason}
    fields |= {key: number for key, number in numbers.items() if number}
    if done.context:
        fields["context"] = done.context
    return fields


def logprob_fields(logprobs: Sequence[Logprob]) -> list[Fields]:
    """Return logprobs as the API has them: one entry per token, alternatives if there are any."""
    entries = []
    for logprob in logprobs:
        entry = _token_fields(logprob.piece, logprob.logprob)
        if logprob.top:
            entry["top_logprobs"] = [_token_fields(*alternative) for alternative in logprob.top]
        entries.append(entry)
    return entries


def _token_fields(piece: bytes, logprob: float) -> Fields:
    return {
        "token": piece.decode("utf-8", "replace"),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(piece),
    }
