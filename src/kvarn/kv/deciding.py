"""Asking a sequence's policy, and acting on what it decides. Reading (`decide`) and writing (`apply`) are apart, so
that a decision can be logged and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvarn.core.events import BlocksDropped, BlocksSealed, BlocksTaken, Event
from kvarn.kv.demotion import blocks_wanted, encode_demoted, insert
from kvarn.kv.eviction import drop_blocks, keep_places, shared_that_change
from kvarn.kv.governing import check_rotation, governed
from kvarn.kv.group import CacheGroup
from kvarn.kv.policies.base import Decision, GroupView, KVPolicy, SequenceView, Signal
from kvarn.kv.reading import group_view
from kvarn.kv.state import SequenceState
from kvarn.kv.turning import Turn, shared_first_blocks, turn_first_blocks


class Deciding:
    """Decisions over the sequences of one manager. turns: each group's rotation, for policies that ask for it."""

    def __init__(
        self, groups: Sequence[CacheGroup], turns: Sequence[Turn | None], emit: Callable[[Event], None]
    ) -> None:
        self._groups, self._turns, self._emit = groups, tuple(turns), emit
        self._size = groups[0].block_size if groups else 1

    def check(self, policy: KVPolicy) -> None:
        """Raises IncompatiblePlan where the policy turns keys and the model's rotation does not allow it."""
        check_rotation(policy, [t for g, t in zip(self._groups, self._turns, strict=True) if governed(g.spec)])

    def decide(self, state: SequenceState) -> Decision | None:
        """Ask the sequence's policy, where it has one and there is something to decide."""
        if (policy := state.policy) is None or not self._asks(state):
            return None
        due = self._due(state, policy)
        state.decided_blocks = state.length // self._size
        if not due:
            return None
        per_token = self._governed_bytes()
        return policy.decide(SequenceView(state.length, state.prompt_tokens, self._size, per_token, self._views(state)))

    def wants_rereading(self, state: SequenceState) -> bool:
        """Whether the policy will decide next, and for the first time, on what reading the text again shows."""
        policy = state.policy
        if policy is None or Signal.RECONSTRUCTION not in policy.signals or state.reread:
            return False
        return self._asks(state) and self._due(state, policy)

    def _asks(self, state: SequenceState) -> bool:
        """The prompt is complete, and another block is since the policy was asked last."""
        return state.length >= state.prompt_tokens and state.length // self._size != state.decided_blocks

    def _due(self, state: SequenceState, policy: KVPolicy) -> bool:
        longest = max(int(g.tables.fill[g.rows(r)].max()) for g, r in zip(self._groups, state.rows, strict=True))
        return policy.due(state.length, state.prompt_tokens, longest, self._size, self._governed_bytes())

    def _views(self, state: SequenceState) -> tuple[GroupView | None, ...]:
        for group in self._groups:
            group.settle_mass()
        rings = state.rings or (None,) * len(self._groups)
        reread = state.reread or (None,) * len(self._groups)
        moments = state.moments or (None,) * len(self._groups)
        return tuple(
            group_view(g, r, state.length, ring, turn, summed, again) if governed(g.spec) else None
            for g, r, ring, turn, summed, again in zip(
                self._groups, state.rows, rings, self._turns, moments, reread, strict=True
            )
        )

    def _governed_bytes(self) -> int:
        """Bytes that one token takes in the groups that policies can shrink."""
        mine = [g for g in self._groups if governed(g.spec)]
        return sum(g.pool_block_bytes[g.home] * g.rows_per_seq // g.block_size for g in mine)

    def wants(self, state: SequenceState, decision: Decision) -> dict[tuple[int, int], int]:
        """By group and pool: the free blocks that acting on a decision takes: for what moves there, and for copies of
        blocks that others hold too. Raises ValueError where it is no decision over this sequence."""
        self._check_shapes(state, decision)
        found: Counter[tuple[int, int]] = Counter()
        whole = state.policy is not None and not state.policy.rewrites
        demote = decision.demote or (None,) * len(self._groups)
        for index, (keep, to) in enumerate(zip(decision.keep, demote, strict=True)):
            group, row = self._groups[index], state.rows[index]
            if keep is not None and to is not None:
                found.update({(index, pool): n for pool, n in blocks_wanted(group, to).items()})
                keep = keep & (to <= 0)
            if keep is not None and (to is not None or not whole):
                found.update((index, pool) for pool, _, _ in shared_that_change(group, row, keep))
        for index, tokens in enumerate(decision.turn):
            if tokens:
                shared = shared_first_blocks(self._groups[index], state.rows[index], decision.first_blocks)
                found.update((index, pool) for pool, _, _ in shared)
        return {place: n for place, n in found.items() if n}

    def apply(self, state: SequenceState, decision: Decision) -> None:
        """Act on a decision; the caller made sure that what it `wants` is free."""
        self._check_shapes(state, decision)
        for group in self._groups:
            group.settle_mass()
        demote = decision.demote or (None,) * len(self._groups)
        for index, (keep, to) in enumerate(zip(decision.keep, demote, strict=True)):
            if keep is not None:
                self._keep(state, index, keep, to, decision.note)
        for index, columns in enumerate(decision.seal):
            if columns is not None:
                self._seal(state, index, columns, decision.seal_into[index])
        for index, tokens in enumerate(decision.turn):
            if tokens:
                self._turn(state, index, decision.first_blocks, tokens)

    def _check_shapes(self, state: SequenceState, decision: Decision) -> None:
        """Raises ValueError for a decision over other places than the sequence has: a policy's mistake must not reach
        the tables."""
        if len(decision.keep) != len(self._groups):
            raise ValueError(f"a decision over {len(decision.keep)} cache groups; there are {len(self._groups)}")
        sides = (decision.keep, decision.demote or (None,) * len(self._groups))
        for group, row, *given in zip(self._groups, state.rows, *sides, strict=True):
            wanted = (group.rows_per_seq, int(group.tables.fill[group.rows(row)].max(initial=0)))
            for array in given:
                if array is not None and array.shape != wanted:
                    raise ValueError(f"a decision over places {array.shape}; the sequence has {wanted}")

    def _keep(self, state: SequenceState, index: int, keep: np.ndarray, to: np.ndarray | None, note: str) -> None:
        """Drop what is not kept of one group, and move what is to be moved."""
        if to is not None:
            self._demote(state, index, keep, to, note)
            return
        group, row = self._groups[index], state.rows[index]
        whole = state.policy is not None and not state.policy.rewrites
        gone = drop_blocks(group, row, keep) if whole else keep_places(group, row, keep)
        self._tell_dropped(state, index, gone, note)

    def _seal(self, state: SequenceState, index: int, columns: np.ndarray, pool: int) -> None:
        source, target = self._groups[index].seals.seal_columns(state.rows[index], columns, pool)
        if source:
            self._emit(BlocksSealed(state.seq_id, index, source, target, pool))

    def _tell_dropped(self, state: SequenceState, index: int, gone: list[tuple[int, int]], note: str) -> None:
        self._emit(BlocksDropped(state.seq_id, index, tuple(b for _, b in gone), note, tuple(p for p, _ in gone)))

    def _demote(self, state: SequenceState, index: int, keep: np.ndarray, to: np.ndarray, note: str) -> None:
        """Move some kept places of one group into other pools, drop those not kept."""
        group, row = self._groups[index], state.rows[index]
        view = group_view(group, row, state.length, None)
        numbers = view.keys(), view.values()
        made = encode_demoted(group, row, to, view.positions, numbers)
        mass = {i: _mass_of(view, m.row - row, to[m.row - row] == m.pool, group.block_size) for i, m in enumerate(made)}
        gone = keep_places(group, row, keep & (to <= 0))
        insert(group, made, mass)
        for new in made:
            self._emit(BlocksTaken(state.seq_id, index, new.pool, new.blocks))
        self._tell_dropped(state, index, gone, note)

    def _turn(self, state: SequenceState, index: int, blocks: int, tokens: int) -> None:
        """Turn the first blocks of one group."""
        turn = self._turns[index]
        assert turn is not None, "the policy was checked for it"
        before = state.written.get(index)
        made = turn_first_blocks(self._groups[index], state.rows[index], blocks, tokens, turn, before)
        state.written[index] = made


def _mass_of(view: GroupView, row: int, moved: np.ndarray, block_size: int) -> np.ndarray:
    """[n, B]: the attention mass of the places of a row that move, in the order of the text."""
    places = np.flatnonzero(moved)
    places = places[np.argsort(view.positions[row, places])]
    mass = np.zeros(len(places), np.float32) if view.mass is None else view.mass[row, places]
    return mass.reshape(-1, block_size)
