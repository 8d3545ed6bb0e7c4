"""The interactive chat of `headrace run`: lines and /commands in, answers out.

Ctrl-C stops an answer or clears the line, Ctrl-D or /bye ends. Replies to commands go to stderr,
like everything that is not an answer. Knows the conversation, not the engine.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.engine.errors import EngineError, InvalidRequest
from headrace.server.commands.chat_session import PARAMETERS, ChatSession

HELP = f'''\
/set system TEXT             the system message from now on; without TEXT, none
/set parameter NAME VALUE    a parameter of the answers from now on
/show                        the model, its context and the parameters
/clear                       forget the conversation
/bye, /exit, Ctrl-D          leave
/?, /help                    this text

""" begins and ends a message of several lines. Ctrl-C stops an answer.
Parameters: {", ".join(PARAMETERS)}
'''
_BLOCK = '"""'
_MAX_HISTORY = 1000

Ask = Callable[[str], None]
Facts = Callable[[], dict[str, str]]


class Interactive:
    """One user at one terminal; reads until the input ends or /bye."""

    def __init__(self, session: ChatSession, ask: Ask, facts: Facts) -> None:
        """Take the conversation, what shows the answer to a text, and what /show begins with."""
        self._session = session
        self._ask = ask
        self._facts = facts
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Answer until there is no more to read; errors of one message are told, and it goes on."""
        while True:
            try:
                text, is_command = self._read()
                if is_command and text.strip() in ("/bye", "/exit"):
                    return
                if is_command:
                    _say(self._obey(text))
                elif text.strip():
                    self._ask(text)
                    _say("")
            except EOFError:
                return
            except KeyboardInterrupt:
                pass  # it stopped an answer; the next line begins anew
            except EngineError as error:
                _say(f"headrace: error: {error}")

    def _read(self) -> tuple[str, bool]:
        """Return the next message or command, and whether it is a command.

        Raises:
            EOFError: there is no more.
        """
        try:
            text = self._line(">>> ")
            opening, mark, rest = text.partition(_BLOCK)
            if not mark or (opening and not opening.startswith("/set system")):
                return text, text.startswith("/")
            while (end := rest.find(_BLOCK)) < 0:
                rest += "\n" + self._line("... ")
            return opening + rest[:end], bool(opening)
        except KeyboardInterrupt:
            _say("\nCtrl-D or /bye leaves")
            return "", False
        except EOFError:
            if self._is_terminal:
                _say("")
            raise

    def _line(self, prompt: str) -> str:
        if self._is_terminal:
            return input(prompt)
        if sys.stdin.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    def _obey(self, line: str) -> str:
        """Do what a /command says and return the reply.

        Raises:
            InvalidRequest: it is none, or what follows it is wrong.
        """
        command, _, rest = line.partition(" ")
        match command, rest.split():
            case (("/?" | "/help"), _):
                return HELP
            case "/clear", []:
                self._session.clear()
                return "the conversation is forgotten"
            case "/show", []:
                return self._shown()
            case "/set", ["system", *_]:
                self._session.system = rest.strip().removeprefix("system").strip()
                return "the system message is set" if self._session.system else "no system message"
            case "/set", ["parameter", name, *values] if values:
                self._session.set_parameter(name, values)
                return f"parameter {name} is {' '.join(values)}"
            case "/set", _:
                raise InvalidRequest("expected /set system TEXT or /set parameter NAME VALUE")
            case _:
                raise InvalidRequest(f"unknown command {line.strip()!r}, /? lists the commands")

    def _shown(self) -> str:
        rows = {**self._facts(), "system": self._session.system or "none"}
        rows |= {name: str(value) for name, value in self._session.parameters.items()}
        width = max(map(len, rows))
        return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


@contextlib.contextmanager
def line_history(path: Path) -> Iterator[None]:
    """Edit lines on the terminal with the history in the file at path, which is kept up to date."""
    import readline  # only on a terminal: it may write to it when it is loaded

    readline.set_history_length(_MAX_HISTORY)
    try:
        readline.read_history_file(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _say(f"headrace: warning: {path}: can't be read: {_reason(error)}")
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
        except OSError as error:
            _say(f"headrace: warning: {path}: can't be written: {_reason(error)}")


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0).lower()


def _say(text: str) -> None:
    print(text, file=sys.stderr)
