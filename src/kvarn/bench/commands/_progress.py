"""What a long measurement is doing, on stderr: one changing line on a terminal, a line for each step otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def doing(every_s: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Gives the function that is told what begins; the time since the beginning stands beside it. every_s: least time
    between two lines where there is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(every_s)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what: bar.update(task, description=what)


class _Lines:
    def __init__(self, every_s: float) -> None:
        self._begun, self._every_s, self._next = time.monotonic(), every_s, 0.0

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            click.echo(f"{now - self._begun:6.0f} s  {what}", err=True)
            self._next = now + self._every_s
