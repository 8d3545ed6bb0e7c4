"""Errors that a user can cause or meet.

EngineError 500
  InvalidRequest 400    PromptTooLong 400     ModelNotFound 404
  Overloaded 503        ModelUnusable 500     EngineDied 500
  WeightsUnreadable 500
    (ModelUnusable: the file can't be run; ModelFileError: not even read; DoesNotFit: too large)

Each class carries the HTTP status that fits it; across the process border an error travels as
kind, status and message. Anything that is not an EngineError is a bug and ends the engine process.
"""

from __future__ import annotations


class EngineError(Exception):
    """The engine could not do what was asked."""

    status = 500


class InvalidRequest(EngineError):
    """The request is malformed or asks for something that this model can't do."""

    status = 400


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the context."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        # "prompt too long; exceeded max context length by N tokens" is what agents look for
        # to start a compaction; the rest tells a person what to change.
        super().__init__(
            f"prompt too long; exceeded max context length by {n_prompt - n_ctx + 1} tokens"
            f" (it has {n_prompt}; a context of {n_ctx} holds {n_ctx - 1} and one token of answer)"
        )
        self.n_prompt, self.n_ctx = n_prompt, n_ctx


class ModelNotFound(EngineError):
    """No model of that name is served."""

    status = 404


class Overloaded(EngineError):
    """More requests are waiting than the queue holds."""

    status = 503


class ModelUnusable(EngineError):
    """The model file was read but can't be run by this engine."""


class DoesNotFit(ModelUnusable):
    """Not even the smallest plan of the model fits the memory there is.

    helpful_flags are what would make it fit, beside more memory.
    """

    def __init__(
        self, message: str, needed_bytes: int, budget_bytes: int,
        helpful_flags: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.needed_bytes, self.budget_bytes = needed_bytes, budget_bytes
        self.helpful_flags = helpful_flags


class ModelFileError(ModelUnusable):
    """The model file is not a valid GGUF; the message names path, what was found and expected."""


class WeightsUnreadable(EngineError):
    """Weights of a loaded model could not be read for a step; names file, offset and reason."""


class EngineDied(EngineError):
    """The engine process ended while requests were open."""
