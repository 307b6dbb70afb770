"""What the cache manager did, as data: for the event stream, for replay, for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """`seq_id`: the sequence concerned."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class SequenceAdmitted(Event):
    """cached_tokens: tokens found in the prefix index; prefix: why no more of them (None: nothing was looked up)."""

    cached_tokens: int
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksTaken(Event):
    """Blocks of one group's pool taken for a sequence."""

    group: int
    pool: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksDropped(Event):
    """Blocks that left a sequence's table; `why` in a few words. pools: of each block, the pool it belongs to."""

    group: int
    blocks: tuple[int, ...]
    why: str
    pools: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlocksSealed(Event):
    """Full blocks re-encoded: open block -> block of the pool `pool`, pairwise."""

    group: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    pool: int = 1


@dataclass(frozen=True, slots=True)
class PrefixEvicted(Event):
    """Blocks that only the prefix index held made room for others (seq_id -1: they belonged to none)."""

    n_blocks: int
    why: str


@dataclass(frozen=True, slots=True)
class SequenceReleased(Event):
    """All of the sequence's blocks were given back."""


EventSink = Callable[[Event], None]
