"""What commands that measure print: speeds and bars for people, one JSON object for programs."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table


class Terminal(Console):
    """A rich console whose reader may leave."""

    def on_broken_pipe(self) -> None:
        """Let cli.py end the command, as it does for what is not printed by rich."""
        raise BrokenPipeError


def print_json(value: object) -> None:
    """Print value as one line of JSON."""
    # Flushed here, so that a reader who has left is noticed here.
    print(msgspec.json.encode(value).decode(), flush=True)


def speed(bytes_per_s: float) -> str:
    """Return a speed as disks and memory are sold: "1.21 GB/s"."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def bars(rows: dict[str, float]) -> Table:
    """Return a chart of speeds in bytes/s by what has them; the longest bar is the fastest."""
    chart = Table.grid(padding=(0, 1))
    chart.add_column(justify="right", no_wrap=True)
    chart.add_column(max_width=30, ratio=1)
    chart.add_column(no_wrap=True)
    fastest = max(rows.values(), default=1.0)
    for name, bytes_per_s in rows.items():
        bar = ProgressBar(total=fastest, completed=bytes_per_s, finished_style="bar.complete")
        chart.add_row(name, bar, speed(bytes_per_s))
    return chart
