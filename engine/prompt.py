"""Prompt segments in, token ids out: where BOS and control tokens are decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.engine.errors import InvalidRequest
from headrace.engine.messages import Generate, Segment


class Tokenizer(Protocol):
    """What is needed of a vocabulary; llama.Vocab is the real one."""

    bos: int
    adds_bos: bool

    def tokenize(self, text: str, *, parses_control: bool) -> list[int]: ...
    def contains(self, tokens: Sequence[int]) -> bool: ...


def tokenize_segments(
    vocab: Tokenizer, segments: Sequence[Segment], *, is_continued: bool = False
) -> list[int]:
    """Return the tokens of segments with the BOS that the vocabulary asks for.

    If the vocabulary adds one there is exactly one, whether the text spells none or several;
    otherwise the text is taken as it is (ChatML's BOS is the mark that begins every message). A
    continued prompt follows tokens that are there already and gets none.
    """
    tokens: list[int] = []
    for segment in segments:
        tokens += vocab.tokenize(segment.text, parses_control=segment.is_trusted)
    if not vocab.adds_bos:
        return tokens
    n_bos = 0
    while n_bos < len(tokens) and tokens[n_bos] == vocab.bos:
        n_bos += 1
    return tokens[n_bos:] if is_continued else [vocab.bos, *tokens[n_bos:]]


def prompt_tokens(vocab: Tokenizer, request: Generate) -> list[int]:
    """Return the tokens of a request's prompt, those of its deprecated context first.

    Raises:
        InvalidRequest: the context has ids that the vocabulary does not know.
    """
    prefix = list(request.prefix_tokens)
    if not vocab.contains(prefix):
        raise InvalidRequest("context has token ids that are not in the model's vocabulary")
    return prefix + tokenize_segments(vocab, request.prompt, is_continued=bool(prefix))
