"""Who computes how many tokens in the next step. Pure: integers in, a plan out; time is an argument.

Why every admitted request finishes. The running sequences stand in one fixed order (`Sequence.rank`); room is taken
from the last only, for one before it, so the first always gets its row. A sequence preempted `max_preemptions` times
becomes *protected*: it goes before all others and runs only while no other protected one does, so nobody can preempt
it again. The waiting ones go by priority, then by what their tenant was served, then by arrival; a priority that is
passed over for `aging_s` counts as the next higher one until one of its sequences had a turn. Nobody is admitted past
the first one that does not fit, so that one gets in when enough others have finished.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence as Tokens
from dataclasses import replace

from kvarn.core.errors import DoesNotFit
from kvarn.core.ledger import CacheLedger, NoRoom
from kvarn.engine.fairness import FairShare
from kvarn.engine.reasons import (
    Admitted,
    AwaitsParent,
    AwaitsProtected,
    Behind,
    Expired,
    NoBlocks,
    NoBudget,
    NoSlot,
    OutOfRoom,
    Preempted,
    RanOut,
    Stalled,
    WaitReason,
)
from kvarn.engine.sequence import Entry, Phase, Rank, Sequence
from kvarn.engine.step_plan import Row, SchedulerConfig, StepDraft, StepPlan
from kvarn.engine.waiting import WaitingQueue, class_of

CandidateKey = tuple[int, int, int, float, int]


class Scheduler:
    """add, then again and again: schedule, compute, advance (fork, finish). Owns no block: the ledger does."""

    def __init__(self, config: SchedulerConfig, cache: CacheLedger) -> None:
        self.config, self._cache = config, cache
        self._seqs: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # by rank
        self._deadlines: list[tuple[float, int]] = []
        self._fair = FairShare()
        self._passed_over_since_s: dict[int, float] = {}  # by priority

    # ---- what a caller may ask -------------------------------------------------------------------------------------

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._seqs)

    def sequence(self, seq_id: int) -> Sequence:
        """To read, not to write. KeyError where it is unknown or gone."""
        return self._seqs[seq_id]

    def find(self, seq_id: int) -> Sequence | None:
        """As `sequence`, but None where it is unknown or gone."""
        return self._seqs.get(seq_id)

    def why_waiting(self, seq_id: int) -> WaitReason | None:
        """What a sequence waits for now; None where it runs or is gone."""
        seq = self._seqs.get(seq_id)
        if seq is None or seq.phase is Phase.RUNNING:
            return None
        if seq.phase is Phase.UNBORN:
            return self._parent_wait(seq)
        if ahead := self._waiting.ahead_of(seq):
            return Behind(ahead)
        return seq.waits[-1] if seq.waits else Behind(0)

    def _parent_wait(self, seq: Sequence) -> WaitReason:
        assert seq.parent_id is not None
        return AwaitsParent(seq.parent_id)

    # ---- requests come and go --------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Queue a request. Raises DoesNotFit at once where waiting would not help."""
        for seq_id in (entry.seq_id, *entry.child_ids):
            assert seq_id not in self._seqs, f"sequence {seq_id} is already known"
        self._check_fits(entry)
        seq = Sequence(entry, list(entry.prompt_ids), children=list(entry.child_ids))
        self._enter(seq)
        self._waiting.add(seq)
        for child_id in entry.child_ids:
            child = replace(entry, seq_id=child_id, child_ids=())
            self._enter(Sequence(child, list(entry.prompt_ids), phase=Phase.UNBORN, parent_id=entry.seq_id))

    def _enter(self, seq: Sequence) -> None:
        seq.level, seq.protected = seq.entry.priority, self.config.max_preemptions == 0
        self._seqs[seq.seq_id] = seq
        self._fair.enter(seq.entry.tenant)
        if seq.entry.deadline_s is not None:
            heapq.heappush(self._deadlines, (seq.entry.deadline_s, seq.seq_id))

    def _check_fits(self, entry: Entry) -> None:
        prompt, limit = len(entry.prompt_ids), self.config.context_tokens
        if prompt + entry.max_tokens > limit:
            raise DoesNotFit(
                f"{prompt} prompt tokens and {entry.max_tokens} new ones exceed the context of {limit} tokens",
                fixes=_shorter(prompt, entry.max_tokens, limit, "a larger --context"),
            )
        if reason := self._cache.never_fits(entry.slots_tokens):
            most = _most_tokens(self._cache, entry.slots_tokens)
            raise DoesNotFit(
                f"{prompt} prompt tokens and {entry.max_tokens} new ones never fit the KV cache: {reason}",
                fixes=_shorter(prompt, entry.max_tokens, most + 1, "a larger --kv-memory, or a smaller --kv format"),
            )

    def advance(self, seq_id: int, n_computed: int, appended: Tokens[int] = ()) -> None:
        """A row was computed: n_computed of its tokens now stand in the cache, and these were generated. A sequence
        that was cancelled meanwhile is passed over."""
        if (seq := self._seqs.get(seq_id)) is None:
            return
        if not self.config.recompute_all:
            seq.computed_tokens += n_computed
        seq.tokens.extend(appended)

    def fork(self, child_id: int, appended: Tokens[int]) -> None:
        """Start a further completion with its first token, after `advance` of the row that named it and before the next
        `schedule` and the parent's `finish`. Without room for it, it waits and computes its prompt itself."""
        if (child := self._seqs.get(child_id)) is None:
            return
        assert child.parent_id is not None, f"sequence {child_id} is no child that waits to be forked"
        parent = self._seqs[child.parent_id]
        parent.children.remove(child_id)
        child.parent_id = None
        child.tokens.extend(appended)
        full = len(self._running) >= self.config.max_seqs
        if full or child.protected or self._cache.fork(parent.seq_id, child_id) is not None:
            self._wait(child)
            return
        child.level = parent.level
        child.computed_tokens, child.slots_tokens = parent.computed_tokens, parent.slots_tokens
        child.cached_tokens = child.best_tokens = len(child.entry.prompt_ids)
        self._run(child)

    def finish(self, seq_id: int) -> bool:
        """Forget a sequence, whatever it is doing, and give its blocks back. False where it is unknown or gone.
        Children that wait for its prompt go on without it."""
        if (seq := self._seqs.pop(seq_id, None)) is None:
            return False
        self._fair.leave(seq.entry.tenant)
        if seq.phase is Phase.RUNNING:
            self._stop(seq)
        elif seq.phase is Phase.WAITING:
            self._waiting.remove(seq)
        elif seq.parent_id is not None:
            self._seqs[seq.parent_id].children.remove(seq_id)
        if seq.children:
            self._promote(seq.children)
        return True

    cancel = finish

    def _promote(self, children: list[int]) -> None:
        """The first of these takes their parent's place."""
        heir = self._seqs[children[0]]
        heir.parent_id, heir.children = None, children[1:]
        for child_id in heir.children:
            self._seqs[child_id].parent_id = heir.seq_id
        self._wait(heir)

    # ---- from one phase to the other -------------------------------------------------------------------------------

    def _wait(self, seq: Sequence) -> None:
        seq.phase = Phase.WAITING
        self._waiting.add(seq)

    def _run(self, seq: Sequence) -> None:
        seq.phase = Phase.RUNNING
        insort(self._running, seq, key=_rank)

    def _stop(self, seq: Sequence) -> None:
        index = bisect_left(self._running, seq.rank, key=_rank)
        assert self._running[index] is seq
        del self._running[index]
        self._cache.release(seq.seq_id)

    def _preempt(self, victim: Sequence, for_seq: Sequence, step: StepDraft) -> None:
        """Take all blocks of the victim; it computes its tokens again later."""
        self._stop(victim)
        if (row := step.rows.pop(victim.seq_id, None)) is not None:
            step.left_tokens += row.n_tokens
        times, limit = len(victim.preemptions) + 1, self.config.max_preemptions
        lost = victim.computed_tokens
        why = Preempted(victim.seq_id, for_seq.seq_id, lost, times, limit, step.now_s)
        victim.preemptions.append(why)
        victim.computed_tokens = victim.slots_tokens = 0
        victim.protected = times >= limit
        step.preempted.append(why)
        self._wait(victim)

    # ---- one step --------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> StepPlan:
        """Decide one step and take its blocks. O(running sequences + classes of waiting ones)."""
        step = StepDraft(now_s, self.config.step_tokens)
        self._expire(step)
        for seq in self._running.copy():
            if seq.phase is Phase.RUNNING and seq.pending_tokens == 1 and step.left_tokens:
                self._give(seq, 1, step)
        if step.rows and self.config.beside_decodes_tokens is not None:
            beside = self.config.beside_decodes_tokens + self.config.prefill_per_decode * len(step.rows)
            step.left_tokens = min(step.left_tokens, beside)
        self._prefill(step)
        return step.done(len(self._waiting))

    def _expire(self, step: StepDraft) -> None:
        while self._deadlines and self._deadlines[0][0] <= step.now_s:
            deadline_s, seq_id = heapq.heappop(self._deadlines)
            if self.finish(seq_id):
                step.ended.append(Expired(seq_id, deadline_s, step.now_s))

    def _give(self, seq: Sequence, n_tokens: int, step: StepDraft) -> None:
        """A row for a running sequence, if there is room for its tokens."""
        start = seq.computed_tokens
        if not self._grow(seq, start + n_tokens, step):
            return
        step.left_tokens -= n_tokens
        seq.slots_tokens = max(seq.slots_tokens, start + n_tokens)
        samples = n_tokens == seq.pending_tokens
        children = tuple(seq.children) if samples and seq.children else ()
        step.rows[seq.seq_id] = Row(seq.seq_id, start, n_tokens, samples, children)
        if start + n_tokens > seq.best_tokens:
            self._fair.charge(seq.entry.tenant, start + n_tokens - seq.best_tokens)
            seq.best_tokens = start + n_tokens

    def _grow(self, seq: Sequence, to_tokens: int, step: StepDraft) -> bool:
        """Slots up to to_tokens; where there is no room, the last of the running ones gives its blocks."""
        while (room := self._cache.extend(seq.seq_id, to_tokens)) is not None:
            victim = self._running[-1]
            if victim is not seq:
                self._preempt(victim, seq, step)
            elif len(self._running) > 1:
                step.stalled.append(Stalled(seq.seq_id, room))
                return False
            else:
                self._end_without_room(seq, room, step)
                return False
        return True

    def _end_without_room(self, seq: Sequence, room: NoRoom, step: StepDraft) -> None:
        self.finish(seq.seq_id)
        step.ended.append(OutOfRoom(seq.seq_id, len(seq.tokens), room))

    def _prefill(self, step: StepDraft) -> None:
        """Divide what is left of the step among prompts, running and waiting ones in one order."""
        prompts = self._prompts(step)
        since_s = self._passed_over_since_s
        self._passed_over_since_s = {s.entry.priority: since_s.get(s.entry.priority, step.now_s) for s in prompts}
        candidates = [(self._key(s, step.now_s), s) for s in prompts]
        heapq.heapify(candidates)
        admitting = True
        while candidates and (step.left_tokens > 0 or not step.rows):
            key, seq = heapq.heappop(candidates)
            now_key = self._key(seq, step.now_s)
            if now_key > key:  # its tenant was served meanwhile
                heapq.heappush(candidates, (now_key, seq))
            elif seq.phase is Phase.RUNNING:
                self._take_turn(seq, step)
            elif admitting and not step.ran_out:
                next_of = class_of(seq)
                admitting = self._consider(seq, step)
                if admitting and (following := self._waiting.head_of(next_of)) not in (None, seq):
                    heapq.heappush(candidates, (self._key(following, step.now_s), following))
        self._note_head(step)

    def _prompts(self, step: StepDraft) -> list[Sequence]:
        """Running sequences with more than the next token to compute, and the first waiting ones."""
        least = 0 if self.config.recompute_all else 1
        running = [s for s in self._running if s.pending_tokens > least and s.seq_id not in step.rows]
        return running + self._waiting.heads()

    def _chunk(self, seq: Sequence, step: StepDraft) -> int:
        """Tokens of the sequence that this step can compute; 0: none of them."""
        pending = seq.pending_tokens
        if self.config.recompute_all:
            return pending if pending <= step.left_tokens or not step.rows else 0
        end = seq.entry.chunk_end(seq.computed_tokens)
        most = pending if end is None else end - seq.computed_tokens
        return min(pending, step.left_tokens, most, self.config.chunk_tokens or pending)

    def _take_turn(self, seq: Sequence, step: StepDraft) -> None:
        if n_tokens := self._chunk(seq, step):
            self._give(seq, n_tokens, step)
            self._passed_over_since_s[seq.entry.priority] = step.now_s

    def _consider(self, seq: Sequence, step: StepDraft) -> bool:
        """Admit a waiting sequence and give it a first chunk, or keep why not. False: nobody may pass it."""
        if seq.protected and self._running and self._running[0].protected:
            seq.note_wait(AwaitsProtected(self._running[0].seq_id))
            return True
        if not self._chunk(seq, step):
            step.head_wait = NoBudget(self.config.step_tokens)
            return False
        while (reason := self._admit(seq, step)) is not None and self._yields(seq):
            self._preempt(self._running[-1], seq, step)
        if reason is None:
            self._take_turn(seq, step)
            return True
        if isinstance(reason, NoBlocks) and not self._running:
            self._end_without_room(seq, reason.room, step)
            return True
        step.head_wait = reason
        return False

    def _admit(self, seq: Sequence, step: StepDraft) -> WaitReason | None:
        """Register a waiting sequence with the cache and move it to the running ones; else why not."""
        running = len(self._running) + sum(len(s.children) for s in self._running)
        if running and running + 1 + len(seq.children) > self.config.max_seqs:
            return NoSlot(running, self.config.max_seqs)
        entry, headroom = seq.entry, self._headroom_tokens()
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
        self._waiting.remove(seq)
        seq.level = self._level(seq, step.now_s)
        seq.computed_tokens = seq.slots_tokens = cached
        seq.best_tokens = max(seq.best_tokens, cached)
        if seq.cached_tokens is None:
            seq.cached_tokens = cached
        self._run(seq)
        step.admitted.append(Admitted(seq.seq_id, cached))
        return None

    def _headroom_tokens(self) -> int:
        """What the running sequences still have to take: their prompts' remaining slots, and some to grow."""
        promised = sum(len(s.tokens) - s.slots_tokens for s in self._running)
        return promised + self.config.growth_tokens * len(self._running)

    def _yields(self, seq: Sequence) -> bool:
        """Whether the last running sequence must make room for a waiting one: only for a higher priority."""
        if not self._running:
            return False
        last = self._running[-1]
        return not last.protected and last.level < seq.entry.priority

    def _note_head(self, step: StepDraft) -> None:
        """Keep why the first waiting sequence still waits."""
        if not self._waiting:
            return
        if step.head_wait is None:
            step.head_wait = RanOut() if step.ran_out else NoBudget(self.config.step_tokens)
        first = min(self._waiting.heads(), key=lambda s: self._key(s, step.now_s))
        first.note_wait(step.head_wait)

    def _level(self, seq: Sequence, now_s: float) -> int:
        """Its priority, raised by the time for which that priority was passed over."""
        priority = seq.entry.priority
        if not self.config.aging_s:
            return priority
        return priority + int((now_s - self._passed_over_since_s.get(priority, now_s)) / self.config.aging_s)

    def _key(self, seq: Sequence, now_s: float) -> CandidateKey:
        entry = seq.entry
        served = self._fair.served_tokens(entry.tenant)
        return (not seq.protected, -self._level(seq, now_s), served, entry.arrival_s, entry.seq_id)


def _rank(seq: Sequence) -> Rank:
    return seq.rank


def _most_tokens(cache: CacheLedger, too_many: int) -> int:
    """The most tokens that fit an empty cache; too_many do not."""
    low, high = 0, too_many - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cache.never_fits(middle) is None else (low, middle - 1)
    return low


def _shorter(prompt: int, new: int, limit: int, larger: str) -> tuple[str, ...]:
    """Ways to bring prompt + new to `limit` tokens, cheapest first."""
    fixes = (f"max_tokens of at most {limit - prompt}",) if prompt < limit else ()
    if limit > new:
        fixes += (f"a prompt of at most {limit - new} tokens",)
    return (*fixes, larger)
