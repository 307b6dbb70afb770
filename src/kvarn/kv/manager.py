"""The only writer of the cache: admits sequences, takes and gives back blocks, commits what a step wrote, seals, drops.

One step goes: `extend` each sequence (slots exist) -> `begin_step` (slots get their positions, kernels get their
operands) -> the model runs -> `commit` each sequence (what counts, stays) or `abort_step` (nothing does).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from kvarn.core.events import (
    BlocksTaken,
    Event,
    EventSink,
    SequenceAdmitted,
    SequenceReleased,
)
from kvarn.core.ledger import NoRoom
from kvarn.core.options import CachePlan
from kvarn.core.specs import LayerSpec
from kvarn.kernels.api import Backend
from kvarn.kv.deciding import Deciding
from kvarn.kv.governing import check_policy, governed
from kvarn.kv.group import CacheGroup
from kvarn.kv.moments import QueryMoments
from kvarn.kv.places import layer_places
from kvarn.kv.policies.base import Decision, KVPolicy, Signal
from kvarn.kv.rereading import Rereading, begin_rereading
from kvarn.kv.room import Room
from kvarn.kv.settling_room import SettlingRoom
from kvarn.kv.sharing import PrefixSharing, why_unused
from kvarn.kv.signals import QueryRing
from kvarn.kv.sizing import blocks_for
from kvarn.kv.state import SequenceState
from kvarn.kv.stats import CacheMemory, bytes_by_format, measure, measure_sequence
from kvarn.kv.step import CacheStep, Span
from kvarn.kv.steps import Steps
from kvarn.kv.turning import Turn

log = logging.getLogger("kvarn.kv")


class CacheManager:
    """The paged cache of one engine. model_id, a fingerprint of the weights and of how they are computed, turns prefix
    caching on. turns: each model layer's rotation, for policies that ask for it. In mode 'contiguous' it is the
    baseline that reserves the whole context at once."""

    def __init__(
        self,
        plan: CachePlan,
        layers: Sequence[LayerSpec],
        backend: Backend,
        *,
        device: torch.device | str = "cpu",
        poison: bool = False,
        emit: EventSink | None = None,
        model_id: str | None = None,
        turns: Sequence[Turn | None] = (),
    ) -> None:
        self.plan, self.backend = plan, backend
        self._emit = _quiet(emit)
        self.device = torch.device(device)
        self.groups = tuple(CacheGroup(g, plan, backend, self.device, poison) for g in plan.groups)
        self.places = layer_places(layers, plan)
        self.sequences: dict[int, SequenceState] = {}
        self._assigned: dict[int, tuple[KVPolicy | None, int]] = {}
        sharable = plan.mode == "paged" and model_id is not None
        self.prefixes = PrefixSharing(self.groups, plan.block_size, model_id or "") if sharable else None
        self._room = Room(plan, self.groups, self.prefixes, self._emit)
        self._settling = SettlingRoom(self.groups, self.sequences)
        self._steps = Steps(self.sequences, self.groups, self.places, backend, self.prefixes, self._emit)
        self._deciding = Deciding(self.groups, [turns[g.layers[0]] if turns else None for g in self.groups], self._emit)
        self.peak = measure(self)

    # -- admission and room ---------------------------------------------------------------------------------------
    def never_fits(self, total_tokens: int) -> str | None:
        """Why a sequence of total_tokens cannot fit even in an empty cache, with the numbers; None if it can."""
        return self._room.never_fits(total_tokens)

    def admit(
        self, seq_id: int, token_ids: Sequence[int], namespace: bytes, *, headroom_tokens: int = 0, reuse: bool = True
    ) -> int | NoRoom:
        """Register a sequence; returns how many of its tokens are already cached: those that the prefix index holds of
        its namespace. Takes no new block yet, but for a partly used prefix block's copy, and for the contiguous
        baseline, which takes all that the context could need."""
        assert seq_id not in self.sequences, f"sequence {seq_id} admitted twice"
        if len(self.sequences) >= self.plan.max_seqs:
            return self._room.no_slot()
        policy, prompt_tokens = self._assigned.get(seq_id, (None, 0))
        match = None
        if self.prefixes is not None and self.prefix_roles(policy)[0]:
            sought = token_ids if reuse else ()
            if policy is not None and policy.decides:  # what comes behind the prompt hangs on what was decided
                sought = sought[:prompt_tokens]
            match = self.prefixes.lookup(seq_id, sought, namespace)
        place = self.prefixes.index.acquire(match) if self.prefixes and match else None
        short = self._room.short_for(len(token_ids), headroom_tokens, match)
        if short := short or self._settling.short_for_tokens(policy, len(token_ids)):
            if self.prefixes and place:
                self.prefixes.index.unpin(place)
            return short
        state = SequenceState(seq_id, tuple(g.take_row() for g in self.groups), place=place)
        state.policy, state.prompt_tokens = policy, prompt_tokens
        state.rings, state.moments = _rings(policy, self.groups), _moments(policy, self.groups)
        self.sequences[seq_id] = state
        if self.plan.mode == "contiguous" and (short := self._reserve_context(state)):
            self.release(seq_id)
            return short
        if self.prefixes:
            state.prefix_why = why_unused(policy, reuse)
        if self.prefixes and match:
            state.indexed, state.prefix_why = len(match.nodes), state.prefix_why or match.why
            state.token_ids.extend(token_ids[: self.prefixes.take_over(state, match)])
            if policy is not None and policy.decides and not policy.leaves_prompt:
                self.prefixes.leave(state)  # what it will drop is not to stay because the index holds it
        self._emit(SequenceAdmitted(seq_id, state.length, str(state.prefix_why) if state.prefix_why else None))
        return state.length

    def _reserve_context(self, state: SequenceState) -> NoRoom | None:
        blocks = blocks_for(self.plan.context_tokens, self.plan.block_size)
        for group, row in zip(self.groups, state.rows, strict=True):
            if not group.reserve_run(row, min(blocks, group.tables.columns)):
                return NoRoom(blocks, "a run of consecutive blocks")
        self._note_slots(state)
        self._note_peak()
        return None

    def extend(self, seq_id: int, to_tokens: int) -> NoRoom | None:
        """Make slots for logical tokens [0, to_tokens) exist. All or nothing, over all groups. What a policy decided
        and found no blocks for is done first."""
        state = self.sequences[seq_id]
        if short := self._act(state):
            return short
        if to_tokens <= state.reserved:
            return None
        new = to_tokens - state.length
        wants = [g.blocks_wanted(r, new) for g, r in zip(self.groups, state.rows, strict=True)]
        if short := self._settling.short_for_blocks(state.policy, wants) or self._room.make(wants):
            return short
        for index, (group, row, want) in enumerate(zip(self.groups, state.rows, wants, strict=True)):
            if want and (taken := group.take(row, new)):
                self._emit(BlocksTaken(seq_id, index, 0, taken))
        self._note_slots(state)
        return None

    def _note_slots(self, state: SequenceState) -> None:
        """Write down how far the sequence can grow without another block."""
        slack = min(g.slack_tokens(r) for g, r in zip(self.groups, state.rows, strict=True)) if self.groups else 0
        state.reserved = state.length + slack if self.groups else self.plan.context_tokens

    def fork(self, parent_id: int, child_id: int) -> NoRoom | None:
        """A new sequence that shares all of the parent's blocks; each copies the last, partly filled one when it first
        writes into it. In the contiguous baseline the child gets a reservation of its own and a copy."""
        if len(self.sequences) >= self.plan.max_seqs:
            return self._room.no_slot()
        parent = self.sequences[parent_id]
        if short := self._settling.short_for_child(parent):
            return short
        for group in self.groups:
            group.settle_mass()
        child = parent.child(child_id, tuple(g.take_row() for g in self.groups))
        self.sequences[child_id] = child
        try:
            short = self._share(parent, child)
        except BaseException:
            self.release(child_id)
            raise
        if short is not None:
            self.release(child_id)
            return short
        self._note_slots(parent)
        self._note_slots(child)
        self._emit(SequenceAdmitted(child_id, parent.length))
        return None

    def _share(self, parent: SequenceState, child: SequenceState) -> NoRoom | None:
        """The child's rows hold what the parent's do."""
        contiguous = self.plan.mode == "contiguous"
        if self.prefixes is not None:
            self.prefixes.fork(parent, child)
        if contiguous and (short := self._reserve_context(child)):
            return short
        for group, source, target in zip(self.groups, parent.rows, child.rows, strict=True):
            (group.copy_row if contiguous else group.share_row)(source, target)
        if parent.policy is not None and Signal.ATTENTION_MASS in parent.policy.signals and not self._own_all(child):
            return NoRoom(0, "blocks for a copy: attention mass is counted a sequence")
        return None

    def _own_all(self, state: SequenceState) -> bool:
        """Give the sequence copies of all its blocks; False where they do not fit."""
        shared = [g.shared_places(r) for g, r in zip(self.groups, state.rows, strict=True)]
        wants = Counter((index, pool) for index, places in enumerate(shared) for pool, _, _ in places)
        if self._room.short_by(wants, self._settling):
            return False
        for group, places in zip(self.groups, shared, strict=True):
            group.own_blocks(places)
        return True

    def release(self, seq_id: int) -> None:
        """Give all of a sequence's blocks back."""
        state = self.sequences.pop(seq_id)
        for group, row in zip(self.groups, state.rows, strict=True):
            group.clear_row(row)
        if self.prefixes is not None:
            self.prefixes.leave(state)
        self._emit(SequenceReleased(seq_id))

    # -- a step ---------------------------------------------------------------------------------------------------
    def begin_step(self, spans: Sequence[Span]) -> CacheStep:
        """The operands of one step. Each span continues its sequence where it stands; its slots must exist."""
        step = self._steps.begin(spans)
        self._note_peak(sum(s.n_tokens for s in spans))
        return step

    def settle(self, step: CacheStep) -> None:
        """The model ran: what the step sealed on its way is sealed."""
        self._steps.settle(step)

    def commit(self, seq_id: int, token_ids: Sequence[int], written_tokens: int | None = None) -> None:
        """The first len(token_ids) of the tokens that the step wrote for one sequence stay; the others' slots are
        emptied (rejected drafts). Then what is at rest is settled, as by `come_to_rest`."""
        state, kept = self.sequences[seq_id], len(token_ids)
        if written_tokens is not None and written_tokens > kept:
            for group, row in zip(self.groups, state.rows, strict=True):
                group.empty_slots(row, kept, written_tokens)
        self.commit_step([Span(seq_id, state.length, kept)], [token_ids])
        self.come_to_rest(seq_id)

    def commit_step(self, spans: Sequence[Span], token_ids: Sequence[Sequence[int]]) -> list[int]:
        """All that the step wrote for these spans stays. Only counts: blocks stay as they are. Returns the sequences
        that must go through `come_to_rest`, and then `decide`."""
        return self._steps.commit(spans, token_ids)

    def come_to_rest(self, seq_id: int) -> None:
        """Seal what the last step made old enough, give the prefix index what is complete, give back what is behind
        every window."""
        self._steps.come_to_rest(seq_id)

    def abort_step(self, spans: Sequence[Span]) -> list[int]:
        """Forget what a step wrote: the slots of these spans hold nothing. Returns the sequences whose sums, of
        attention mass or of queries, have counted the step all the same, so that policies must not read them."""
        return self._steps.abort(spans)

    # -- policies -------------------------------------------------------------------------------------------------
    def assign(self, seq_id: int, policy: KVPolicy | None, prompt_tokens: int) -> None:
        """From its next admission on, `policy` decides over the blocks of this sequence. prompt_tokens: of them, those
        that came in; the policy is first asked when they are all computed. Raises IncompatiblePlan."""
        if policy is not None:
            check_policy(policy, self.plan)
            self._deciding.check(policy)
        self._assigned[seq_id] = (policy, prompt_tokens)

    def unassign(self, seq_id: int) -> None:
        """The sequence is gone for good."""
        self._assigned.pop(seq_id, None)

    def decide(self, seq_id: int) -> Decision | None:
        """Ask the sequence's policy, where it has one and there is something to decide."""
        return self._deciding.decide(self.sequences[seq_id])

    def wants_rereading(self, seq_id: int) -> bool:
        """Whether the next `decide` needs to know what the text's tokens are worth when the model reads it again."""
        return self._deciding.wants_rereading(self.sequences[seq_id])

    def begin_rereading(self, seq_id: int, n_tokens: int, again: range) -> Rereading:
        """The operands of a step of n_tokens behind the sequence that stores nothing, in which its tokens at `again`
        are read once more."""
        state = self.sequences[seq_id]
        return begin_rereading(self.groups, self.places, self.backend, state.rows, state.length, n_tokens, again)

    def note_rereading(self, seq_id: int, parts: Sequence[Rereading]) -> None:
        """These parts, in their order, make up the whole text."""
        by_group = zip(*(p.weights for p in parts), strict=True)
        joined = [[w for w in weights if w is not None] for weights in by_group]
        self.sequences[seq_id].reread = tuple(np.concatenate(w, axis=1) if w else None for w in joined)

    def apply(self, seq_id: int, decision: Decision) -> bool:
        """Act on a decision. False, and nothing is changed, where blocks are missing: then the next `extend` does it
        first, or says how many are."""
        state = self.sequences[seq_id]
        state.decision = decision
        return self._act(state) is None

    def _act(self, state: SequenceState) -> NoRoom | None:
        """Act on what the sequence's policy decided; NoRoom, and nothing is changed, where that takes blocks that are
        not there, not even after evicting what only the prefix index holds."""
        if (decision := state.decision) is None:
            return None
        while wants := self._deciding.wants(state, decision):
            short = self._room.short_by(wants, self._settling)
            if not short:
                break
            if not self._room.evict_for(short):
                (index, _), missing = next(iter(short.items()))
                return NoRoom(missing, f"{self.groups[index].describe(index)}, for what its policy decided")
        self._deciding.apply(state, decision)
        state.decision = None
        self._note_slots(state)
        return None

    def prefix_roles(self, policy: KVPolicy | None) -> tuple[bool, bool]:
        """Whether the prompts of sequences with this policy are looked up, and whether others find their full blocks
        while they are computed."""
        finds = self.prefixes is not None and (policy is None or policy.prefix_pure)
        return finds, finds and (policy is None or not policy.decides or policy.leaves_prompt)

    # -- looking --------------------------------------------------------------------------------------------------
    def memory(self) -> CacheMemory:
        """What is held now."""
        return measure(self)

    def prefix_reason(self, seq_id: int) -> str | None:
        """Where the sequence's prefix lookup ended, and why; None where nothing was looked up."""
        state = self.sequences.get(seq_id)
        return str(state.prefix_why) if state and state.prefix_why else None

    def sequence_bytes(self, seq_id: int) -> tuple[int, int]:
        """(physical, logical) bytes of one sequence now; (0, 0) where it is not admitted."""
        return measure_sequence(self, seq_id)

    def bytes_by_format(self, seq_id: int) -> dict[str, int]:
        """The physical bytes of one sequence now, by the format of its blocks; empty where it is not admitted."""
        return bytes_by_format(self, seq_id)

    def _note_peak(self, in_flight_tokens: int = 0) -> None:
        now = measure(self, in_flight_tokens)
        if now.physical_bytes >= self.peak.physical_bytes:
            self.peak = now

    def reset_peak(self) -> None:
        self.peak = measure(self)

    def check(self) -> None:
        """Every ledger balances, and each held block is referenced exactly as often as tables name it."""
        for index, group in enumerate(self.groups):
            also = self.prefixes.named(index) if self.prefixes else None
            group.check([s.rows[index] for s in self.sequences.values()], also)
        if self.prefixes is not None:
            self.prefixes.index.check()


def _rings(policy: KVPolicy | None, groups: Sequence[CacheGroup]) -> tuple[QueryRing | None, ...]:
    if policy is None or Signal.RECENT_QUERIES not in policy.signals:
        return ()
    return tuple(QueryRing(policy.query_tokens) if governed(g.spec) else None for g in groups)


def _moments(policy: KVPolicy | None, groups: Sequence[CacheGroup]) -> tuple[QueryMoments | None, ...]:
    if policy is None or Signal.QUERY_MOMENTS not in policy.signals:
        return ()
    return tuple(QueryMoments(policy.first_query, len(g.layers)) if governed(g.spec) else None for g in groups)


def _quiet(emit: EventSink | None) -> EventSink:
    """Who listens cannot break what it is told of."""
    if emit is None:
        return lambda event: None

    def told(event: Event) -> None:
        try:
            emit(event)
        except Exception:
            log.exception("a listener to cache events failed")

    return told
