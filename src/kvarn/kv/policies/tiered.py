"""More bits for what attention reads most, fewer for the rest, none for the least."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.formats import parse_kv_format
from kvarn.core.options import Grain
from kvarn.kv.policies.base import Budget, Decision, GroupView, KVPolicy, SequenceView, Signal


@dataclass(frozen=True)
class Tiered(KVPolicy):
    """Mixed precision by importance (as MiKV, Yang et al. 2024, arXiv 2402.18096, and GEAR-like methods argue: keep in
    few bits what eviction would drop). By layer and KV head: the first `sinks` and the newest `recent` tokens stay in
    full precision; of the others, ranked by accumulated attention, the first go to `heavy` blocks, the next to `light`
    blocks, the last are dropped.

    budget: bytes of a sequence's blocks, or the tokens (or the share of the text) that would take as many in full
    precision. heavy_share: of the bytes that the full part leaves, what the heavy tier may take.

    The budget holds for the blocks, partly filled ones and the room to grow until the next decision included, from the
    end of the prompt on. It cannot be below the full part: sinks, recent and three blocks a head.
    A token never comes back to more bits; a light block leaves as a whole, when its mean attention is least.
    """

    grain: ClassVar[Grain] = "head"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION_MASS, Signal.KEYS, Signal.VALUES})
    rewrites: ClassVar[bool] = True
    budget: Budget = field(default_factory=lambda: Budget(share=0.5))
    heavy: str = "int8"
    light: str = "int4"
    heavy_share: float = 0.5
    sinks: int = 4
    recent: int = 32

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 1:
            raise IncompatiblePlan(f"sinks is {self.sinks}, recent is {self.recent}; use at least 0 and 1")
        if not 0 <= self.heavy_share <= 1:
            raise IncompatiblePlan(f"heavy_share is {self.heavy_share}; it is a share, 0 to 1")
        for name in ("heavy", "light"):
            if not parse_kv_format(getattr(self, name)).sealed_only:
                raise IncompatiblePlan(f"{name} is {getattr(self, name)}", fixes=("a quantized format",))
        if not parse_kv_format(self.heavy).rewritable:
            raise IncompatiblePlan(
                f"heavy is {self.heavy}: single tokens leave it, and its blocks cannot be rewritten",
                fixes=("heavy=int8",),
            )
        if self.heavy == self.light:
            raise IncompatiblePlan(f"heavy and light are both {self.heavy}", fixes=("two formats", "h2o with one"))

    @property
    def tiers(self) -> tuple[str, ...]:
        return (self.heavy, self.light)

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        if self.budget.share == 1:
            return False
        return longest_row > self.budget.tokens_at(length, bytes_per_token) - block_size

    def decide(self, view: SequenceView) -> Decision | None:
        tokens = self.budget.tokens_at(view.length, view.bytes_per_token)
        demote = tuple(None if g is None else self._tiers(g, view, tokens) for g in view.groups)
        keep = tuple(None if d is None else d >= 0 for d in demote)
        return Decision(keep, f"tiers within the bytes of {tokens} tokens", demote=demote)

    def _tiers(self, group: GroupView, view: SequenceView, tokens: int) -> np.ndarray:
        """[R, S] int: -1 dropped, 0 stays as it is, else the pool it goes to."""
        pools = [group.pool_of(name) for name in self.tiers]
        assert group.mass is not None and group.pools is not None, "attention mass was asked for"
        made = np.zeros(group.positions.shape, dtype=np.int64)
        room = int(tokens * group.block_bytes[0]) // view.block_size
        for row in range(len(made)):
            self._row(made[row], group.positions[row], group.mass[row], group.pools[row], group, view, room, pools)
        return made

    def _row(
        self,
        made: np.ndarray,
        positions: np.ndarray,
        mass: np.ndarray,
        pool: np.ndarray,
        group: GroupView,
        view: SequenceView,
        room: int,
        pools: list[int],
    ) -> None:
        """Decide over one row's places. room: its bytes."""
        size, (heavy, light) = view.block_size, pools
        held = positions >= 0
        fixed = held & (pool == 0) & ((positions < self.sinks) | (positions >= view.length - self.recent))
        n_heavy, n_light = self._blocks(int(fixed.sum()), group, size, room, heavy, light)
        free = np.flatnonzero(held & ~fixed & (pool != light))
        ranked = free[np.argsort(-mass[free], kind="stable")]
        stay = max(0, n_heavy - 1) * size  # one block of room for heavy tokens that wait to fill a light one
        best, rest = ranked[:stay], ranked[stay:]
        self._fill_heavy(made, best[pool[best] == 0], heavy, size, stay - int((pool[best] == heavy).sum()))
        self._fill_light(made, rest, mass, pool, light, size, n_light)

    def _blocks(self, fixed: int, group: GroupView, size: int, room: int, heavy: int, light: int) -> tuple[int, int]:
        """Blocks of the heavy and light tiers beside what stays open until the next decision."""
        open_blocks = -(-(fixed + 3 * size) // size)
        left = max(0, room - open_blocks * group.block_bytes[0])
        h = int(left * self.heavy_share) // group.block_bytes[heavy]
        return h, (left - h * group.block_bytes[heavy]) // group.block_bytes[light]

    def _fill_heavy(self, made: np.ndarray, candidates: np.ndarray, heavy: int, size: int, room: int) -> None:
        """Whole blocks of the open candidates; the others wait."""
        n = min(len(candidates), max(0, room)) // size * size
        made[candidates[:n]] = heavy

    def _fill_light(
        self, made: np.ndarray, rest: np.ndarray, mass: np.ndarray, pool: np.ndarray, light: int, size: int, room: int
    ) -> None:
        """Blocks that are light already and new ones of the rest compete by mean mass; the least are dropped. Fewer
        tokens than a block wait, the heaviest of them."""
        waits = len(rest) % size if room else 0
        new = [rest[i : i + size] for i in range(waits, len(rest), size)] if room else []
        if not room:
            made[rest] = -1
        old = list(np.flatnonzero(pool == light).reshape(-1, size))
        ranked = sorted([*old, *new], key=lambda places: -float(mass[places].mean()))
        for block in ranked[room:]:
            made[block] = -1
        for block in new:
            made[block[made[block] == 0]] = light


POLICY = Tiered
