"""Logging to stderr: the configuration, and the one line that each finished request gets."""

from __future__ import annotations

import logging
import logging.config
from dataclasses import dataclass

from headrace.engine.messages import Timings

logger = logging.getLogger("headrace.requests")

COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
RESET = "\x1b[0m"


class ColourFormatter(logging.Formatter):
    """Formats a record with its level coloured when it is a warning or worse."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        colour = COLOURS.get(record.levelname)
        return f"{colour}{text}{RESET}" if colour else text


def configure(level: str, *, is_coloured: bool) -> None:
    """Send the log to stderr, from level up."""
    formatter = ColourFormatter if is_coloured else logging.Formatter
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"()": formatter, "fmt": line}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"level": level.upper(), "handlers": ["stderr"]},
            # Its own lines about start and end say nothing that ours don't.
            "loggers": {"uvicorn": {"level": "WARNING"}, "asyncio": {"level": "WARNING"}},
        }
    )


@dataclass(slots=True)
class RequestLog:
    """What is said about one request when it has ended; never what was asked or answered."""

    model: str
    client: str = "-"
    path: str = "-"
    status: int = 200
    uid: int = 0
    finish: str = "-"
    """stop, length, load, disconnected, or "error: " and what the client was told."""
    ttft_s: float = 0.0
    timings: Timings | None = None

    def write(self) -> None:
        """Write the line."""
        counts = self.timings
        decode_s = counts.decode_ns / 1e9 if counts else 0
        logger.info(
            "uid=%d model=%s n_prompt=%d n_cached=%d n_generated=%d ttft_s=%.3f"
            " tokens_per_s=%.2f finish=%r client=%s path=%s status=%d",
            self.uid,
            self.model,
            counts.n_prompt if counts else 0,
            counts.n_cached if counts else 0,
            counts.n_generated if counts else 0,
            self.ttft_s,
            counts.n_generated / decode_s if counts and decode_s else 0,
            self.finish,
            self.client,
            self.path,
            self.status,
        )
