"""An Engine in this process, on a thread of its own: what run and bench have instead of a server.

In: a Load, then requests. Out: their events, to whoever iterates over them. Knows no terminal and
no templates. The thread that made a LocalEngine is the one that uses it.
"""

from __future__ import annotations

import itertools
import queue
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import NoReturn

from headrace.engine.loading import LoadedEngine, load_engine, pin
from headrace.engine.messages import Done, Event, Failed, Generate, Load, Segment, Token
from headrace.engine.prompt import prompt_tokens, tokenize_segments
from headrace.server.errors import error_of

# A step that takes longer makes the end of the command wait, and the user wonder.
_PATIENCE_S = 1.0


class LocalEngine:
    """A loaded model in this process; a with statement ends it."""

    def __init__(self, load: Load, *, repacks: bool = True, learns: bool = False) -> None:
        """Load the model and start its thread; a Ctrl-C while it loads ends the process.

        If it learns, what is seen of experts and speed is kept for later forecasts; measurements
        with random tokens would teach it nothing.

        Raises:
            EngineError: the model can't be loaded.
        """
        self._load = load
        self._repacks = repacks
        self._learns = learns
        self._uids = itertools.count(1)
        self._ready: queue.SimpleQueue[LoadedEngine | BaseException] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        try:
            loaded = self._ready.get()
        except KeyboardInterrupt:
            _die_of_interrupt()
        if isinstance(loaded, BaseException):
            self._thread.join()
            raise loaded
        self.loaded = loaded
        self._engine = loaded.engine

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def n_ctx(self) -> int:
        """Tokens that a prompt and its answer may have, at present."""
        return self._engine.n_ctx

    def next_uid(self) -> int:
        """Return an id for a request, unique in this engine."""
        return next(self._uids)

    def count(self, prompt: Sequence[Segment]) -> int:
        """Return the number of tokens of prompt."""
        return len(tokenize_segments(self._engine.vocab, prompt))

    def generate(
        self, request: Generate, tokens: Sequence[int] = ()
    ) -> Generator[Token | Done, None, None]:
        """Yield the events of request up to its Done; tokens, if given, are its prompt.

        Closing the iterator before its end cancels the request.

        Raises:
            EngineError: the request failed.
        """
        self._engine.submit(request, list(tokens) or prompt_tokens(self._engine.vocab, request))
        try:
            while True:
                event = self._events.get()
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, Failed) and event.uid == request.uid:
                    raise error_of(event)
                # Others are of a request that was cancelled, or of no interest here.
                if isinstance(event, Token | Done) and event.uid == request.uid:
                    yield event
                    if isinstance(event, Done):
                        return
        finally:
            self._engine.cancel(request.uid)

    def close(self) -> None:
        """Stop after the step at hand and free everything; a Ctrl-C meanwhile ends the process."""
        self._engine.stop()
        try:
            self._thread.join(_PATIENCE_S)
            if self._thread.is_alive():
                wait = "waiting for the model's step at hand, Ctrl-C ends at once"
                print(f"headrace: {wait}", file=sys.stderr)
                self._thread.join()
        except KeyboardInterrupt:
            _die_of_interrupt()
        if self._learns:
            self.loaded.keep_learnt()
        self._engine.close()

    def _run(self) -> None:
        try:
            pin(self._load.decode_cpus)  # OpenMP's threads are made by this one, and inherit
            loaded = load_engine(self._load, self._emit, repacks=self._repacks)
        except BaseException as error:  # raised again where it is waited for
            self._ready.put(error)
            return
        self._ready.put(loaded)
        try:
            loaded.engine.run()
        except BaseException as error:  # the same
            self._events.put(error)

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            self._events.put(event)


def _die_of_interrupt() -> NoReturn:
    """End the process by SIGINT: llama.cpp may be in a long call, which nothing else ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("the signal ended the process")
