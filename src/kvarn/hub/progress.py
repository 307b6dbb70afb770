"""Progress of a fetch, as the fetchers report it; who shows it is not their concern."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how far a fetch has come. `total_bytes` is 0 while it is unknown."""

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None: ...


def silent(what: str, done_bytes: int, total_bytes: int) -> None:
    """Shows nothing."""
