"""The sequences of a scheduler and their phases: waiting, running, unborn, gone. Owns no block: the ledger does."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Tokens
from dataclasses import replace

from kvarn.core.ledger import CacheLedger
from kvarn.engine.fitting import check_fits
from kvarn.engine.holding import Holding
from kvarn.engine.pacing import Pace
from kvarn.engine.reasons import AwaitsParent, Behind, Repeats, WaitReason
from kvarn.engine.running import RunningList
from kvarn.engine.sequence import Entry, Phase, Sequence
from kvarn.engine.step_plan import SchedulerConfig
from kvarn.engine.turns import Turns
from kvarn.engine.waiting import WaitingQueue


class Sequences:
    """Requests come, advance, fork and go."""

    def __init__(self, config: SchedulerConfig, cache: CacheLedger, pace: Pace | None = None) -> None:
        """pace: learns how much of long prompts a step may carry beside rows that decode; None: as configured."""
        self.config, self._cache, self.pace = config, cache, pace
        self._seqs: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running = RunningList()
        self._deadlines: list[tuple[float, int]] = []
        self._turns = Turns(config.aging_s)
        self._held = Holding(0 if config.recompute_all else config.hold_tokens, config.hold_s)

    # -- what a caller may ask ------------------------------------------------------------------------------------
    @property
    def n_waiting(self) -> int:
        return len(self._waiting) + len(self._held)

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
        if why := self._held.why(seq):
            return why
        if ahead := self._waiting.ahead_of(seq):
            return Behind(ahead)
        return seq.waits[-1] if seq.waits else Behind(0)

    def _parent_wait(self, seq: Sequence) -> WaitReason:
        assert seq.parent_id is not None
        return AwaitsParent(seq.parent_id)

    # -- requests come and go -------------------------------------------------------------------------------------
    def add(self, entry: Entry) -> None:
        """Queue a request. Raises DoesNotFit at once where waiting would not help."""
        for seq_id in (entry.seq_id, *entry.child_ids):
            assert seq_id not in self._seqs, f"sequence {seq_id} is already known"
        check_fits(entry, self.config.context_tokens, self._cache)
        seq = Sequence(entry, list(entry.prompt_ids), children=list(entry.child_ids))
        self._enter(seq)
        self._waiting.add(seq)
        for child_id in entry.child_ids:
            child = replace(entry, seq_id=child_id, child_ids=())
            self._enter(Sequence(child, list(entry.prompt_ids), phase=Phase.UNBORN, parent_id=entry.seq_id))

    def _enter(self, seq: Sequence) -> None:
        seq.level, seq.protected = seq.entry.priority, self.config.max_preemptions == 0
        self._seqs[seq.seq_id] = seq
        self._turns.enter(seq)
        if seq.entry.deadline_s is not None:
            heapq.heappush(self._deadlines, (seq.entry.deadline_s, seq.seq_id))

    def advance(self, seq_id: int, n_computed: int, appended: Tokens[int] = ()) -> None:
        """A row was computed: n_computed of its tokens now stand in the cache, and these were generated. A sequence
        that was cancelled meanwhile is passed over."""
        if (seq := self._seqs.get(seq_id)) is None:
            return
        if not self.config.recompute_all:
            seq.stand_at(seq.computed_tokens + n_computed)
        seq.tokens.extend(appended)

    def read_again(self, seq_id: int, part_tokens: Tokens[int]) -> None:
        """Before a running sequence goes on, the model reads its text again, in parts of so many tokens."""
        self._seqs[seq_id].again_tokens.extend(part_tokens)

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
        self._turns.leave(seq)
        if seq.phase is Phase.RUNNING:
            self._stop(seq)
        elif seq.phase is Phase.WAITING:
            self._unqueue(seq)
        elif seq.parent_id is not None:
            self._seqs[seq.parent_id].children.remove(seq_id)
        seq.phase = Phase.GONE
        if seq.children:
            self._promote(seq.children)
        return True

    cancel = finish

    def restart(self, seq_id: int) -> None:
        """A running sequence gives its blocks back and computes its tokens again."""
        seq = self._seqs[seq_id]
        assert seq.phase is Phase.RUNNING, f"sequence {seq_id} does not run"
        self._stop(seq)
        seq.stand_at(0)
        seq.slots_tokens = 0
        seq.note_wait(Repeats())
        self._wait(seq)

    def _promote(self, children: list[int]) -> None:
        """The first of these takes their parent's place."""
        heir = self._seqs[children[0]]
        heir.parent_id, heir.children = None, children[1:]
        for child_id in heir.children:
            self._seqs[child_id].parent_id = heir.seq_id
        self._wait(heir)

    # -- from one phase to the other ------------------------------------------------------------------------------
    def _wait(self, seq: Sequence) -> None:
        seq.phase = Phase.WAITING
        self._waiting.add(seq)

    def _unqueue(self, seq: Sequence) -> None:
        if not self._held.remove(seq):
            self._waiting.remove(seq)

    def _run(self, seq: Sequence) -> None:
        seq.phase = Phase.RUNNING
        self._running.add(seq)

    def _stop(self, seq: Sequence) -> None:
        self._running.remove(seq)
        seq.again_tokens.clear()
        seq.again_layers = 0
        self._cache.release(seq.seq_id)
