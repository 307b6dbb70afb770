"""The cache in one step: slots get their positions, and afterwards what the step wrote stays, comes to rest, or never
was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvarn.core.events import BlocksDropped, BlocksSealed, Event
from kvarn.kernels.api import Backend
from kvarn.kv.group import CacheGroup
from kvarn.kv.places import LayerPlaces
from kvarn.kv.policies.base import Signal
from kvarn.kv.sharing import PrefixSharing
from kvarn.kv.signals import NOTHING, Wants
from kvarn.kv.state import SequenceState
from kvarn.kv.step import CacheStep, Span, build_step

COUNTED = {Signal.ATTENTION_MASS, Signal.QUERY_MOMENTS}


class Steps:
    """sequences: the manager's own, to look up."""

    def __init__(
        self,
        sequences: Mapping[int, SequenceState],
        groups: Sequence[CacheGroup],
        places: LayerPlaces,
        backend: Backend,
        prefixes: PrefixSharing | None,
        emit: Callable[[Event], None],
    ) -> None:
        self.sequences, self.groups, self._places, self._backend = sequences, groups, places, backend
        self.prefixes, self._emit = prefixes, emit
        self._windowed = tuple(g for g in groups if g.held_spec.window_tokens is not None)

    def begin(self, spans: Sequence[Span]) -> CacheStep:
        """The operands of one step. Each span continues its sequence where it stands; its slots must exist."""
        for span in spans:
            state = self.sequences[span.seq_id]
            assert span.start == state.length and span.start + span.n_tokens <= state.reserved, f"{span} has no slots"
        states = [self.sequences[s.seq_id] for s in spans]
        wants = _wants(states, len(self.groups))
        return build_step(spans, [s.rows for s in states], self.groups, self._places, self._backend, wants)

    def settle(self, step: CacheStep) -> None:
        """The model ran: what the step sealed on its way is sealed."""
        for group, part in zip(self.groups, step.groups, strict=True):
            if part.seals is not None:
                group.seals.note_encoded()

    def commit(self, spans: Sequence[Span], token_ids: Sequence[Sequence[int]]) -> list[int]:
        """All that the step wrote for these spans stays. Only counts: blocks stay as they are. Returns the sequences
        that must go through `come_to_rest`, and then `decide`."""
        states = [self.sequences[s.seq_id] for s in spans]
        tokens = np.fromiter((s.n_tokens for s in spans), np.int32, len(spans))
        filled, rests = np.zeros((2, len(spans)), dtype=bool)
        for index, group in enumerate(self.groups):
            full, late = group.advance(np.fromiter((s.rows[index] for s in states), np.int64, len(states)), tokens)
            filled, rests = filled | full, rests | late
        due = []
        for state, ids, full, late in zip(states, token_ids, filled.tolist(), rests.tolist(), strict=True):
            grown = len(ids)
            state.token_ids.extend(ids)
            state.length += grown
            state.filled, state.grown = full, grown
            if (
                full
                or late
                or state.policy is not None
                or any(g.sees_less(state.length, grown) for g in self._windowed)
            ):
                due.append(state.seq_id)
        return due

    def come_to_rest(self, seq_id: int) -> None:
        """Seal what the last step made old enough, give the prefix index what is complete, give back what is behind
        every window."""
        state = self.sequences[seq_id]
        for queries in (*state.rings, *state.moments):
            if queries is not None:
                queries.commit(state.grown)
        for index, (group, row) in enumerate(zip(self.groups, state.rows, strict=True)):
            source, target = group.seals.seal_rows(row, state.grown)
            if source:
                self._emit(BlocksSealed(seq_id, index, source, target))
        if state.filled and self.prefixes is not None:
            self.prefixes.feed(state)
        if self.prefixes is not None and state.decides_now:  # its blocks hang on more than the text before them
            self.prefixes.leave(state)
        for index, (group, row) in enumerate(zip(self.groups, state.rows, strict=True)):
            if dropped := group.drop_behind_window(row, state.length, state.grown):
                self._emit(BlocksDropped(seq_id, index, dropped, "behind the window"))

    def abort(self, spans: Sequence[Span]) -> list[int]:
        """Forget what a step wrote: the slots of these spans hold nothing. Returns the sequences whose sums, of
        attention mass or of queries, have counted the step all the same, so that policies must not read them."""
        counted = []
        for span in spans:
            if state := self.sequences.get(span.seq_id):
                for group, row in zip(self.groups, state.rows, strict=True):
                    group.seals.break_promises(row)
                    group.empty_slots(row, 0, span.n_tokens)
                for queries in (*state.rings, *state.moments):
                    if queries is not None:
                        queries.abort()
                if state.policy is not None and state.policy.signals & COUNTED:
                    counted.append(span.seq_id)
        return counted


def _wants(states: Sequence[SequenceState], groups: int) -> list[list[Wants]]:
    """For each group what each sequence's policy wants to know; empty lists where none wants anything."""
    if all(s.policy is None or not s.policy.signals for s in states):
        return [[] for _ in range(groups)]
    return [[_wanted(s, g) for s in states] for g in range(groups)]


def _wanted(state: SequenceState, group: int) -> Wants:
    if state.policy is None:
        return NOTHING
    ring = state.rings[group] if state.rings else None
    moments = state.moments[group] if state.moments else None
    return Wants(Signal.ATTENTION_MASS in state.policy.signals, ring, moments)
