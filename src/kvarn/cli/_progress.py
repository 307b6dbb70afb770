"""Shows a fetch's progress on stderr: bars on a terminal, a line at the beginning and at the end otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvarn.hub.progress import Progress as Report


@contextmanager
def progress_bars() -> Iterator[Report]:
    """Gives the function that fetchers report to."""
    console = Console(stderr=True)
    if console.is_terminal:
        with _bars(console) as bars:
            yield _Bars(bars)
    else:
        yield _Lines(console)


def _bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=None)
        self._bars.update(self._tasks[what], completed=done_bytes, total=total_bytes or None)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun: set[str] = set()

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None:
        if what not in self._begun:
            self._begun.add(what)
            self._console.print(f"fetching {what}", highlight=False)
        if total_bytes and done_bytes == total_bytes:
            self._console.print(f"fetched {what}: {total_bytes:,} bytes", highlight=False)
