"""The prefix index's parts: one node a block of tokens, the shelf on which those nobody uses stand, and what the index
answers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from kvarn.kv.identity import Identity
from kvarn.kv.prefix_why import Why

BlockRef = tuple[int, int]
Part = tuple[BlockRef, ...]
PoolKey = tuple[int, int]  # (group, pool)

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Node:
    """One full block of tokens after those of `parent`. A root has an identity, no parent and no tokens.

    parts: for each cache group its blocks, (pool, block id) for each of the group's table rows, or None where a window
    group dropped them. pins: sequences that stand here. held: pins, and children that are held; 0: nobody uses it.
    window_holds: for each group, sequences whose window reaches it. children: sorted by tokens.
    """

    key: bytes
    shelf: Shelf
    parent: Node | None = None
    tokens: tuple[int, ...] = ()
    depth: int = 0
    parts: list[Part | None] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    window_holds: list[int] = field(default_factory=list)
    pins: int = 0
    held: int = 0
    alive: bool = True
    identity: Identity | None = None


class Shelf:
    """What nobody uses, the longest unused first, of one kind (format, policy): whole nodes, children before their
    parents, and for window groups the parts alone. blocks: how many of each pool stand here.
    roots: how many there are of the kind."""

    def __init__(self, groups: int) -> None:
        self.nodes: OrderedDict[Node, int] = OrderedDict()
        self.parts: tuple[OrderedDict[Node, int], ...] = tuple(OrderedDict() for _ in range(groups))
        self.roots = 0
        self.blocks: Counter[PoolKey] = Counter()

    def put(self, entries: OrderedDict[Node, int], node: Node, tick: int, groups: tuple[int, ...]) -> None:
        """At the end of `entries`; counts the node's blocks in these groups."""
        entries[node] = tick
        self._count(node, groups, +1)

    def remove(self, entries: OrderedDict[Node, int], node: Node, groups: tuple[int, ...]) -> None:
        """Undo `put`, where it was done."""
        if entries.pop(node, None) is not None:
            self._count(node, groups, -1)

    def _count(self, node: Node, groups: tuple[int, ...], sign: int) -> None:
        for group in groups:
            for pool, _ in node.parts[group] or ():
                self.blocks[group, pool] += sign


def oldest(entries: OrderedDict[T, int]) -> T:
    return next(iter(entries))


@dataclass(frozen=True, slots=True)
class Match:
    """What the index holds of a text. nodes: its blocks from the first on; tokens: how many they hold.

    partial: a node whose first partial_tokens tokens come next: usable by copying its blocks. why: why it ends there.
    """

    identity: Identity
    asked_tokens: int
    nodes: tuple[Node, ...]
    tokens: int
    why: Why
    partial: Node | None = None
    partial_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Inserted:
    """node: the sequence's new place, pinned. adopted: the groups whose given blocks the index now refers to (the
    manager adds a reference to each); in the others it had its own already, or there were none."""

    node: Node
    adopted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Eviction:
    """Blocks to give back, one reference each. tokens: how deep in its text; whole: the node is gone, not only a window
    group's part. idle: uses of the index since it was last used."""

    blocks: tuple[tuple[PoolKey, int], ...]
    tokens: int
    whole: bool
    idle: int

    def __str__(self) -> str:
        what = "prefix block" if self.whole else "window part of a prefix block"
        return f"{what} ending at token {self.tokens}: least recently used, {self.idle} uses ago"
