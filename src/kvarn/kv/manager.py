"""The only writer of the cache: admits sequences, takes and gives back blocks, commits what a step wrote, seals, drops.

One step goes: `extend` each sequence (slots exist) -> `begin_step` (slots get their positions, kernels get their
operands) -> the model runs -> `commit` each sequence (what counts, stays) or `abort_step` (nothing does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvarn.core.events import BlocksDropped, BlocksTaken, EventSink, SequenceAdmitted, SequenceReleased
from kvarn.core.ledger import NoRoom
from kvarn.core.options import CachePlan
from kvarn.core.specs import LayerSpec
from kvarn.kernels.api import Backend
from kvarn.kv.group import CacheGroup
from kvarn.kv.places import layer_places
from kvarn.kv.sizing import blocks_for
from kvarn.kv.stats import CacheMemory, measure
from kvarn.kv.step import CacheStep, Span, build_step


@dataclass(slots=True)
class SequenceState:
    """One admitted sequence. rows: its first table row in each group. length: tokens whose K and V are in the cache;
    reserved: tokens that have slots. token_ids: the committed tokens."""

    seq_id: int
    rows: tuple[int, ...]
    length: int = 0
    reserved: int = 0
    token_ids: list[int] = field(default_factory=list)


class CacheManager:
    """The paged cache of one engine; in mode 'contiguous' the baseline that reserves the whole context at once."""

    def __init__(
        self,
        plan: CachePlan,
        layers: Sequence[LayerSpec],
        backend: Backend,
        *,
        device: torch.device | str = "cpu",
        poison: bool = False,
        emit: EventSink | None = None,
    ) -> None:
        self.plan, self.backend = plan, backend
        self._emit = emit or (lambda event: None)
        self.device = torch.device(device)
        self.groups = tuple(CacheGroup(g, plan, backend, self.device, poison) for g in plan.groups)
        self.places = layer_places(layers, plan)
        self.sequences: dict[int, SequenceState] = {}
        self.peak = measure(self)

    # -- admission and room ---------------------------------------------------------------------------------------
    def never_fits(self, total_tokens: int) -> str | None:
        """Why a sequence of total_tokens cannot fit even in an empty cache, with the numbers; None if it can."""
        if total_tokens > self.plan.context_tokens:
            return f"{total_tokens} tokens; the context is {self.plan.context_tokens} tokens"
        for group in self.groups:
            for pool, block_bytes, need in group.peak_blocks(total_tokens):
                if need > pool.n_blocks:
                    whole = f"{pool.n_blocks} ({pool.n_blocks * block_bytes:,} B)"
                    return (
                        f"{total_tokens} tokens take {need} blocks of {self.plan.block_size} tokens "
                        f"({need * block_bytes:,} B); the whole pool has {whole}"
                    )
        return None

    def admit(
        self, seq_id: int, token_ids: Sequence[int], namespace: bytes, *, headroom_tokens: int = 0, reuse: bool = True
    ) -> int | NoRoom:
        """Register a sequence; returns how many of its tokens are already cached. Takes no block yet, but for the
        contiguous baseline, which takes all that the context could need."""
        assert seq_id not in self.sequences, f"sequence {seq_id} admitted twice"
        if short := self._admission_short(len(token_ids), headroom_tokens):
            return short
        state = SequenceState(seq_id, tuple(g.take_row() for g in self.groups))
        self.sequences[seq_id] = state
        if self.plan.mode == "contiguous" and (short := self._reserve_context(state)):
            self.release(seq_id)
            return short
        self._emit(SequenceAdmitted(seq_id, 0))
        return 0

    def _admission_short(self, tokens: int, headroom_tokens: int) -> NoRoom | None:
        if len(self.sequences) >= self.plan.max_seqs:
            return NoRoom(0, f"sequence slots: all {self.plan.max_seqs} are in use")
        if self.plan.mode == "contiguous":
            return None
        for index, group in enumerate(self.groups):
            for pool, _, need in group.peak_blocks(tokens):
                short = need + blocks_for(headroom_tokens, self.plan.block_size) - pool.free_blocks
                if short > 0:
                    return NoRoom(short, group.describe(index))
        return None

    def _reserve_context(self, state: SequenceState) -> NoRoom | None:
        blocks = blocks_for(self.plan.context_tokens, self.plan.block_size)
        for group, row in zip(self.groups, state.rows, strict=True):
            if not group.reserve_run(row, min(blocks, group.tables.columns)):
                return NoRoom(blocks, "a run of consecutive blocks")
        self._note_peak()
        return None

    def extend(self, seq_id: int, to_tokens: int) -> NoRoom | None:
        """Make slots for logical tokens [0, to_tokens) exist. All or nothing, over all groups."""
        state = self.sequences[seq_id]
        new = to_tokens - state.length
        wants = [g.blocks_wanted(r, new) for g, r in zip(self.groups, state.rows, strict=True)]
        for index, (group, want) in enumerate(zip(self.groups, wants, strict=True)):
            if short := group.short_by(want):
                return NoRoom(short, group.describe(index))
        for index, (group, row, want) in enumerate(zip(self.groups, state.rows, wants, strict=True)):
            if want and (taken := group.take(row, new)):
                self._emit(BlocksTaken(seq_id, index, 0, taken))
        state.reserved = max(state.reserved, to_tokens)
        return None

    def fork(self, parent_id: int, child_id: int) -> NoRoom | None:
        """A new sequence that shares all of the parent's blocks; each copies the last, partly filled one when it first
        writes into it."""
        if len(self.sequences) >= self.plan.max_seqs:
            return NoRoom(0, f"sequence slots: all {self.plan.max_seqs} are in use")
        parent = self.sequences[parent_id]
        assert parent.reserved == parent.length or self.plan.mode == "contiguous", "fork in the middle of a step"
        rows = tuple(g.take_row() for g in self.groups)
        self.sequences[child_id] = SequenceState(child_id, rows, parent.length, parent.length, list(parent.token_ids))
        for group, source, target in zip(self.groups, parent.rows, rows, strict=True):
            group.share_row(source, target)
        self._emit(SequenceAdmitted(child_id, parent.length))
        return None

    def release(self, seq_id: int) -> None:
        """Give all of a sequence's blocks back."""
        state = self.sequences.pop(seq_id)
        for group, row in zip(self.groups, state.rows, strict=True):
            group.clear_row(row)
        self._emit(SequenceReleased(seq_id))

    # -- a step ---------------------------------------------------------------------------------------------------
    def begin_step(self, spans: Sequence[Span]) -> CacheStep:
        """The operands of one step. Each span continues its sequence where it stands; its slots must exist."""
        for span in spans:
            state = self.sequences[span.seq_id]
            assert span.start == state.length and span.start + span.n_tokens <= state.reserved, f"{span} has no slots"
        rows = [self.sequences[s.seq_id].rows for s in spans]
        step = build_step(spans, rows, self.groups, self.places, self.backend)
        self._note_peak()
        return step

    def commit(self, seq_id: int, token_ids: Sequence[int], written_tokens: int | None = None) -> None:
        """The first len(token_ids) of the tokens that the step wrote stay; the others' slots are emptied (rejected
        drafts). Then full blocks are sealed, and blocks behind every window are given back."""
        state = self.sequences[seq_id]
        kept = len(token_ids)
        written = kept if written_tokens is None else written_tokens
        state.token_ids.extend(token_ids)
        state.length += kept
        for index, (group, row) in enumerate(zip(self.groups, state.rows, strict=True)):
            if written > kept:
                group.empty_slots(row, kept, written)
            crossed = group.advance(row, kept)
            if crossed:
                group.seal_rows(row)
            if crossed and (dropped := group.drop_behind_window(row, state.length)):
                self._emit(BlocksDropped(seq_id, index, dropped, "behind the window"))
        if self.plan.mode == "paged":
            state.reserved = state.length

    def abort_step(self, spans: Sequence[Span]) -> None:
        """Forget what a step wrote: the slots of these spans hold nothing."""
        for span in spans:
            if state := self.sequences.get(span.seq_id):
                for group, row in zip(self.groups, state.rows, strict=True):
                    group.empty_slots(row, 0, span.n_tokens)

    # -- looking --------------------------------------------------------------------------------------------------
    def memory(self) -> CacheMemory:
        """What is held now."""
        return measure(self)

    def _note_peak(self) -> None:
        now = measure(self)
        if now.physical_bytes >= self.peak.physical_bytes:
            self.peak = now

    def reset_peak(self) -> None:
        self.peak = measure(self)

    def check(self) -> None:
        """Every ledger balances, and each held block is referenced exactly as often as tables name it."""
        for index, group in enumerate(self.groups):
            group.check([s.rows[index] for s in self.sequences.values()])
