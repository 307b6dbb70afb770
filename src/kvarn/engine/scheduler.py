"""Who computes how many tokens in the next step. Pure: integers in, a plan out; time is an argument.

Why every admitted request finishes. The running sequences stand in one fixed order (`Sequence.rank`); room is taken
from the last only, for one before it, so the first always gets its row. A sequence preempted `max_preemptions` times
becomes *protected*: it goes before all others and runs only while no other protected one does, so nobody can preempt
it again. The waiting ones go by priority, then by what their tenant was served, then by arrival; a priority that is
passed over for `aging_s` counts as the next higher one until one of its sequences had a turn. Nobody is admitted past
the first one that does not fit, so that one gets in when enough others have finished.

How long a long prompt takes beside rows that decode: docs/adr/0012.
"""

from __future__ import annotations

import heapq

from kvarn.core.ledger import NoRoom
from kvarn.engine.prices import TokenAllowance
from kvarn.engine.reasons import (
    Admitted,
    AwaitsProtected,
    Expired,
    HeldBack,
    NoBlocks,
    NoBudget,
    NoSlot,
    OutOfRoom,
    Preempted,
    RanOut,
    Stalled,
    WaitReason,
)
from kvarn.engine.sequence import Phase, Sequence
from kvarn.engine.sequences import Sequences
from kvarn.engine.step_plan import Layers, Row, StepDraft, StepPlan
from kvarn.engine.waiting import class_of


class Scheduler(Sequences):
    """add, then again and again: schedule, compute, advance (fork, finish). Owns no block: the ledger does."""

    def schedule(self, now_s: float) -> StepPlan:
        """Decide one step and take its blocks. O(running sequences + classes of waiting ones)."""
        step = StepDraft(now_s, self.config.step_tokens)
        self._expire(step)
        for seq in self._held.released(now_s):
            self._wait(seq)
        watched = False
        for seq in self._running.copy():
            decodes = len(seq.tokens) - seq.computed_tokens == 1 and not seq.again_tokens
            if seq.phase is Phase.RUNNING and decodes and step.left_tokens:
                self._give(seq, 1, step)
                watched |= not seq.entry.patient
        if watched and step.rows and self.config.beside_decodes_tokens is not None:
            self._limit_prompts(len(step.rows), step)
        self._prefill(step)
        return step.done(self.n_waiting)

    def _limit_prompts(self, decodes: int, step: StepDraft) -> None:
        """Beside so many rows that decode: short prompts get a fixed number of tokens, long ones their allowance."""
        beside = (self.config.beside_decodes_tokens or 0) + self.config.prefill_per_decode * decodes
        step.short_tokens = min(step.left_tokens, beside)
        step.allowance = self.pace.allowance(decodes) if self.pace is not None else TokenAllowance(beside)

    def _expire(self, step: StepDraft) -> None:
        while self._deadlines and self._deadlines[0][0] <= step.now_s:
            deadline_s, seq_id = heapq.heappop(self._deadlines)
            if self.finish(seq_id):
                step.ended.append(Expired(seq_id, deadline_s, step.now_s))

    def _give(self, seq: Sequence, n_tokens: int, step: StepDraft, layers: Layers | None = None) -> None:
        """A row for a running sequence, if there is room for its tokens."""
        start = seq.computed_tokens
        if not self._grow(seq, start + n_tokens, step):
            return
        samples = n_tokens == seq.pending_tokens and (layers is None or layers.end == layers.of)
        children = tuple(seq.children) if samples and seq.children else ()
        row = Row(seq.seq_id, start, n_tokens, samples, children, layers)
        step.left_tokens -= n_tokens
        if step.allowance is not None:
            step.short_tokens -= n_tokens
            step.allowance.spend(start, n_tokens, row.share)
        if layers is not None:
            seq.chunk_tokens, seq.chunk_layers = n_tokens, layers.end
        seq.slots_tokens = max(seq.slots_tokens, start + n_tokens)
        step.rows[seq.seq_id] = row
        self._turns.charge(seq, start + n_tokens)

    def _grow(self, seq: Sequence, to_tokens: int, step: StepDraft) -> bool:
        """Slots up to to_tokens; where there is no room, the last of the running ones gives its blocks."""
        while (room := self._cache.extend(seq.seq_id, to_tokens)) is not None:
            victim = self._running.last
            if victim is not seq:
                self._preempt(victim, seq, step)
            elif len(self._running) > 1:
                step.stalled.append(Stalled(seq.seq_id, room))
                return False
            else:
                self._end_without_room(seq, room, step)
                return False
        return True

    def _preempt(self, victim: Sequence, for_seq: Sequence, step: StepDraft) -> None:
        """Take all blocks of the victim; it computes its tokens again later."""
        self._stop(victim)
        if (row := step.rows.pop(victim.seq_id, None)) is not None:
            step.left_tokens += row.n_tokens
        step.again.pop(victim.seq_id, None)
        times, limit = len(victim.preemptions) + 1, self.config.max_preemptions
        lost = victim.computed_tokens
        why = Preempted(victim.seq_id, for_seq.seq_id, lost, times, limit, step.now_s)
        victim.preemptions.append(why)
        victim.stand_at(0)
        victim.slots_tokens = 0
        victim.protected = times >= limit
        step.preempted.append(why)
        self._wait(victim)

    def _end_without_room(self, seq: Sequence, room: NoRoom, step: StepDraft) -> None:
        self.finish(seq.seq_id)
        step.ended.append(OutOfRoom(seq.seq_id, len(seq.tokens), room))

    def _prefill(self, step: StepDraft) -> None:
        """Divide what is left of the step among prompts, running and waiting ones in one order."""
        prompts = self._prompts(step)
        self._turns.wanted(prompts, step.now_s)
        candidates = [(self._turns.key(s, step.now_s), s) for s in prompts]
        heapq.heapify(candidates)
        admitting = True
        while candidates and (step.left_tokens > 0 or not step.rows):
            key, seq = heapq.heappop(candidates)
            now_key = self._turns.key(seq, step.now_s)
            if now_key > key:  # its tenant was served meanwhile
                heapq.heappush(candidates, (now_key, seq))
            elif seq.phase is Phase.RUNNING:
                self._take_turn(seq, step)
            elif admitting and not step.ran_out:
                next_of = class_of(seq)
                admitting = self._consider(seq, step)
                if admitting and (following := self._waiting.head_of(next_of)) not in (None, seq):
                    heapq.heappush(candidates, (self._turns.key(following, step.now_s), following))
        self._note_head(step)

    def _prompts(self, step: StepDraft) -> list[Sequence]:
        """Running sequences with more than the next token to compute or to read again, and the first waiting ones."""
        least = 0 if self.config.recompute_all else 1
        more = (s for s in self._running if s.pending_tokens > least or s.again_tokens)
        running = [s for s in more if s.seq_id not in step.rows]
        return running + self._waiting.heads()

    def _chunk(self, seq: Sequence, step: StepDraft) -> int:
        """Tokens of the sequence that this step can compute; 0: none of them."""
        pending = seq.pending_tokens
        if self.config.recompute_all:
            return pending if pending <= step.left_tokens or not step.rows else 0
        return max(0, min(self._left(seq, step), self._most(seq, step)))

    def _most(self, seq: Sequence, step: StepDraft) -> int:
        """Tokens of the sequence that a row may have, whatever they cost."""
        pending, end = seq.pending_tokens, seq.entry.chunk_end(seq.computed_tokens)
        most = pending if end is None else end - seq.computed_tokens
        return min(pending, step.left_tokens, most, self.config.chunk_tokens or pending)

    def _left(self, seq: Sequence, step: StepDraft) -> int:
        """Tokens of the step that a prompt of its length may have."""
        if step.allowance is None:
            return step.left_tokens
        long = seq.is_long(self.config.short_tokens)
        return min(step.left_tokens, step.allowance.tokens(seq.computed_tokens) if long else step.short_tokens)

    def _read_again(self, seq: Sequence, step: StepDraft) -> bool:
        """A part of its text through all layers, or beside rows that decode through about as many as a prompt's tokens
        would cost. It is a pass of its own, so a part may be longer than what is left of the step. Whether it came on.
        """
        every, begin, n_tokens = self.config.model_layers or 1, seq.again_layers, seq.again_tokens[0]
        most = n_tokens if step.allowance is None else max(0, step.allowance.tokens(seq.computed_tokens))
        layers = Layers(begin, min(every, begin - -every * most // n_tokens), every)
        if layers.end == begin:
            return False
        row = Row(seq.seq_id, seq.computed_tokens, n_tokens, False, (), layers)
        step.again[seq.seq_id] = row
        step.left_tokens -= min(n_tokens, step.left_tokens)
        if step.allowance is not None:
            step.allowance.spend(row.start, n_tokens, row.share)
        seq.again_layers = 0 if row.complete else layers.end
        if row.complete:
            del seq.again_tokens[0]
        return True

    def _take_turn(self, seq: Sequence, step: StepDraft) -> None:
        """Bring it on. Where nothing is left for it, whoever of its priority stands behind it may still get something,
        but that priority counts as passed over."""
        came_on = self._read_again(seq, step) if seq.again_tokens else self._go_on(seq, step)
        if not came_on:
            step.passed_over.add(seq.entry.priority)
        elif seq.entry.priority not in step.passed_over:
            self._turns.had(seq, step.now_s)

    def _go_on(self, seq: Sequence, step: StepDraft) -> bool:
        """The next chunk of its prompt, or some more layers of the one under way. Whether anything was left for it."""
        layers = None
        if layered := seq.chunk_tokens or self._layered(seq, step):
            layers = self._layers(seq, layered, step)
            n_tokens = layered if layered <= step.left_tokens and layers.end > layers.begin else 0
        else:
            n_tokens = self._chunk(seq, step)
        if n_tokens:
            self._give(seq, n_tokens, step, layers)
        return n_tokens > 0

    def _layered(self, seq: Sequence, step: StepDraft) -> int:
        """Tokens of its next chunk where that better goes through the layers in several steps; else 0. Never so many
        that rows that decode could leave no room for it before it is through."""
        every = self.config.model_layers
        if step.allowance is None or not every or not seq.entry.by_layers or not seq.is_long(self.config.short_tokens):
            return 0
        room = self.config.step_tokens - (self.config.max_seqs - 1)
        layered = min(room, self._most(seq, step), step.allowance.layered_tokens(seq.computed_tokens, every))
        return layered if layered > self._chunk(seq, step) > 0 else 0

    def _layers(self, seq: Sequence, n_tokens: int, step: StepDraft) -> Layers:
        """Through which layers the sequence's chunk goes in this step."""
        every, begin = self.config.model_layers, seq.chunk_layers
        n = every if step.allowance is None else step.allowance.layers(seq.computed_tokens, n_tokens, every)
        return Layers(begin, min(every, begin + n), every)

    def _consider(self, seq: Sequence, step: StepDraft) -> bool:
        """Admit a waiting sequence and give it a first chunk, or keep why not. False: nobody may pass it. A long prompt
        that others' pace leaves nothing in this step is admitted all the same, so that short ones can pass it."""
        if seq.protected and self._running and self._running.first.protected:
            seq.note_wait(AwaitsProtected(self._running.first.seq_id))
            return True
        if self._hold_back(seq, step):
            return True
        paced = step.allowance is not None and step.left_tokens > 0 and seq.is_long(self.config.short_tokens)
        if not paced and not self._chunk(seq, step):
            step.head_wait = NoBudget(self.config.step_tokens)
            return False
        while (reason := self._admit(seq, step)) is not None and self._yields(seq):
            self._preempt(self._running.last, seq, step)
        if reason is None:
            self._take_turn(seq, step)
            return True
        if isinstance(reason, NoBlocks) and not self._running:
            self._end_without_room(seq, reason.room, step)
            return True
        step.head_wait = reason
        return False

    def _hold_back(self, seq: Sequence, step: StepDraft) -> bool:
        """Let it stand aside where one that goes before it computes the beginning of its prompt just now."""
        if seq.protected:
            return False
        key = self._turns.key(seq, step.now_s)
        leaders = (s for s in self._running if s.pending_tokens > 1 and self._turns.key(s, step.now_s) < key)
        if (hold := self._held.find(seq, leaders, step.now_s)) is None:
            return False
        self._waiting.remove(seq)
        self._held.add(hold)
        seq.note_wait(hold.why)
        step.held.append(HeldBack(seq.seq_id, hold.why))
        return True

    def _admit(self, seq: Sequence, step: StepDraft) -> WaitReason | None:
        """Register a waiting sequence with the cache and move it to the running ones; else why not."""
        running = self._running.places
        if running and running + 1 + len(seq.children) > self.config.max_seqs:
            return NoSlot(running, self.config.max_seqs)
        entry, headroom = seq.entry, self._running.headroom_tokens(self.config.growth_tokens)
        reuse = entry.reuse_prompt or seq.best_tokens >= len(entry.prompt_ids)
        cached = self._cache.admit(
            seq.seq_id,
            seq.tokens,
            entry.namespace,
            headroom_tokens=headroom,
            reuse=reuse and not self.config.recompute_all,
        )
        if isinstance(cached, NoRoom):
            return NoBlocks(cached, len(seq.tokens), headroom)
        self._unqueue(seq)
        seq.level = self._turns.level(seq, step.now_s)
        seq.computed_tokens = seq.slots_tokens = cached
        seq.uncached_tokens = len(seq.tokens) - cached
        seq.best_tokens = max(seq.best_tokens, cached)
        if seq.cached_tokens is None:
            seq.cached_tokens = cached
        self._run(seq)
        step.admitted.append(Admitted(seq.seq_id, cached))
        return None

    def _yields(self, seq: Sequence) -> bool:
        """Whether the last running sequence must make room for a waiting one: only for a higher priority."""
        if not self._running:
            return False
        last = self._running.last
        return not last.protected and last.level < seq.entry.priority

    def _note_head(self, step: StepDraft) -> None:
        """Keep why the first waiting sequence still waits."""
        if not self._waiting:
            step.head_wait = self._held.any_why
            return
        if step.head_wait is None:
            step.head_wait = RanOut() if step.ran_out else NoBudget(self.config.step_tokens)
        first = min(self._waiting.heads(), key=lambda s: self._turns.key(s, step.now_s))
        first.note_wait(step.head_wait)
