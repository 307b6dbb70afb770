"""Attack the scheduler: add, step, cancel, finish in any order, against a ledger that counts blocks and a model that
knows which tokens are computed. Nothing starves, and nothing is held that is not running."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarn.core.errors import DoesNotFit
from kvarn.core.ledger import NoRoom
from kvarn.engine.pacing import Pace
from kvarn.engine.reasons import Expired
from kvarn.engine.scheduler import Scheduler
from kvarn.engine.sequence import Entry, Phase
from kvarn.engine.step_plan import SchedulerConfig, StepPlan

BLOCK = 4


class Ledger:
    """n_blocks, counted. heeds: whether admission leaves the headroom it is asked for (without, more is preempted).
    hit_tokens: what a prefix index would find."""

    def __init__(self, n_blocks: int, heeds: bool) -> None:
        self.n_blocks, self.heeds, self.hit_tokens = n_blocks, heeds, 0
        self.held: dict[int, int] = {}
        self.free = n_blocks

    def never_fits(self, total_tokens: int) -> str | None:
        return "too long" if -(-total_tokens // BLOCK) > self.n_blocks else None

    def admit(
        self, seq_id: int, token_ids: Sequence[int], namespace: bytes, *, headroom_tokens: int = 0, reuse: bool = True
    ) -> int | NoRoom:
        need = -(-len(token_ids) // BLOCK) + (-(-headroom_tokens // BLOCK) if self.heeds else 0)
        if need > self.free:
            return NoRoom(need - self.free)
        assert seq_id not in self.held
        cached = min(self.hit_tokens, len(token_ids) - 1) if reuse else 0
        self.held[seq_id] = 0
        assert self.extend(seq_id, cached) is None
        return cached

    def extend(self, seq_id: int, to_tokens: int) -> NoRoom | None:
        more = max(0, -(-to_tokens // BLOCK) - self.held[seq_id])
        if more > self.free:
            return NoRoom(more - self.free)
        self.held[seq_id] += more
        self.free -= more
        return None

    def fork(self, parent_id: int, child_id: int) -> NoRoom | None:
        assert child_id not in self.held
        self.held[child_id] = 0
        room = self.extend(child_id, self.held[parent_id] * BLOCK)
        if room is not None:
            del self.held[child_id]
        return room

    def release(self, seq_id: int) -> None:
        self.free += self.held.pop(seq_id)


CONFIGS = st.builds(
    SchedulerConfig,
    max_seqs=st.integers(1, 6),
    step_tokens=st.integers(1, 24),
    context_tokens=st.just(64),
    beside_decodes_tokens=st.none() | st.integers(1, 8),
    short_tokens=st.integers(1, 8),
    chunk_tokens=st.none() | st.integers(1, 8),
    model_layers=st.sampled_from([0, 2, 5]),
    max_preemptions=st.integers(0, 3),
    growth_tokens=st.integers(0, 8),
    aging_s=st.sampled_from([0.0, 0.5, 30.0]),
    recompute_all=st.booleans(),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=CONFIGS, n_blocks=st.integers(2, 16), heeds=st.booleans(), paced=st.booleans())
    def begin(self, config: SchedulerConfig, n_blocks: int, heeds: bool, paced: bool) -> None:
        self.config = config
        self.ledger = Ledger(n_blocks, heeds)
        self.scheduler = Scheduler(config, self.ledger, Pace(2.0) if paced else None)
        self.now_s, self.next_id = 0.0, 0
        self.computed: dict[int, int] = {}  # tokens of each living sequence that stand in the cache
        self.generated: dict[int, int] = {}
        self.layers: dict[int, tuple[int, int]] = {}  # tokens of a chunk under way, and how many layers it went through
        self.entries: dict[int, Entry] = {}

    @rule(
        prompt=st.integers(1, 40),
        new=st.integers(1, 30),
        children=st.sampled_from([0, 0, 0, 1, 3]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("abc"),
        deadline_s=st.sampled_from([None, None, 0.5, 3.0]),
        patient=st.booleans(),
        by_layers=st.booleans(),
    )
    def add(
        self,
        prompt: int,
        new: int,
        children: int,
        priority: int,
        tenant: str,
        deadline_s: float | None,
        patient: bool,
        by_layers: bool,
    ) -> None:
        ids = range(self.next_id, self.next_id + 1 + children)
        deadline_s = None if deadline_s is None else self.now_s + deadline_s
        entry = Entry(
            ids[0],
            tuple(range(prompt)),
            new,
            self.now_s,
            tuple(ids[1:]),
            priority=priority,
            patient=patient,
            tenant=tenant,
            deadline_s=deadline_s,
            by_layers=by_layers,
        )
        fits = prompt + new <= 64 and -(-(prompt + new - 1) // BLOCK) <= self.ledger.n_blocks
        try:
            self.scheduler.add(entry)
        except DoesNotFit:
            assert not fits
            return
        assert fits
        self.next_id = ids.stop
        for seq_id in ids:
            self.computed[seq_id], self.generated[seq_id], self.entries[seq_id] = 0, 0, entry

    @rule(hit_tokens=st.integers(0, 40))
    def prefix_index_changes(self, hit_tokens: int) -> None:
        self.ledger.hit_tokens = hit_tokens

    @rule(seconds=st.sampled_from([0.0, 0.01, 1.0]))
    def step(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.scheduler.schedule(self.now_s))

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.computed)))
        assert self.scheduler.cancel(seq_id)
        self.forget(seq_id)

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def cancel_between_plan_and_result(self, data: st.DataObject) -> None:
        plan = self.scheduler.schedule(self.now_s)
        gone = {e.seq_id for e in plan.ended}
        if left := sorted(self.computed.keys() - gone):
            seq_id = data.draw(st.sampled_from(left))
            assert self.scheduler.cancel(seq_id)
            self.take(plan, cancelled=seq_id)
        else:
            self.take(plan)

    def forget(self, seq_id: int) -> None:
        self.layers.pop(seq_id, None)
        del self.computed[seq_id], self.generated[seq_id], self.entries[seq_id]

    def take(self, plan: StepPlan, cancelled: int | None = None) -> None:
        """What an engine does with a plan, checking every figure of it."""
        assert len({r.seq_id for r in plan.rows}) == len(plan.rows)
        if not self.config.recompute_all or len(plan.rows) > 1:
            assert sum(r.n_tokens for r in plan.rows) <= self.config.step_tokens
        for ended in plan.ended:
            assert isinstance(ended, Expired), ended
            assert self.entries[ended.seq_id].deadline_s == ended.deadline_s <= self.now_s
            self.forget(ended.seq_id)
        if cancelled is not None:
            self.forget(cancelled)
        for admitted in plan.admitted:
            if admitted.seq_id in self.computed:
                self.computed[admitted.seq_id] = admitted.cached_tokens
        for why in plan.preempted:
            assert 1 <= why.times <= self.config.max_preemptions
            self.layers.pop(why.seq_id, None)
            if why.seq_id in self.computed:
                self.computed[why.seq_id] = 0
        if self.scheduler.pace is not None and plan.rows:
            self.scheduler.pace.note(plan.rows, 0.001 * (3 + sum(r.n_tokens * r.share for r in plan.rows)))
        for row in plan.rows:
            if row.seq_id != cancelled:
                self.compute(row, cancelled)
            elif row.children:  # its heir computes the prompt again
                assert all(c in self.computed for c in row.children)

    def compute(self, row, cancelled: int | None) -> None:
        seq = self.scheduler.sequence(row.seq_id)
        total = len(seq.entry.prompt_ids) + self.generated[row.seq_id]
        assert seq.phase is Phase.RUNNING and len(seq.tokens) == total
        assert row.n_tokens > 0 and row.start == self.computed[row.seq_id]
        assert row.samples == (row.complete and row.start + row.n_tokens == total)
        assert self.ledger.held[row.seq_id] * BLOCK >= row.start + row.n_tokens
        done = self.layers.pop(row.seq_id, (0, 0))
        if row.layers is not None:
            assert self.entries[row.seq_id].by_layers and row.layers.of == self.config.model_layers
            assert done in ((0, 0), (row.n_tokens, row.layers.begin)) and done[1] == row.layers.begin < row.layers.end
        if not row.complete:
            self.layers[row.seq_id] = (row.n_tokens, row.layers.end)
            return
        if self.config.recompute_all:
            assert row.samples
        else:
            self.computed[row.seq_id] += row.n_tokens
        self.scheduler.advance(row.seq_id, row.n_tokens, (7,) if row.samples else ())
        children = [c for c in row.children if c != cancelled]
        for child in children:
            self.scheduler.fork(child, (7,))
            born = self.scheduler.sequence(child).phase is Phase.RUNNING
            self.computed[child] = self.computed[row.seq_id] if born else 0
        for seq_id in (*children, row.seq_id) if row.samples else ():
            self.generated[seq_id] += 1
            if self.generated[seq_id] == self.entries[seq_id].max_tokens:
                assert self.scheduler.finish(seq_id)
                self.forget(seq_id)

    @invariant()
    def ledger_balances(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        ledger, scheduler = self.ledger, self.scheduler
        assert ledger.free + sum(ledger.held.values()) == ledger.n_blocks and ledger.free >= 0
        running = {s for s in self.computed if scheduler.sequence(s).phase is Phase.RUNNING}
        waiting = {s for s in self.computed if scheduler.sequence(s).phase is Phase.WAITING}
        assert set(ledger.held) == running and len(running) == scheduler.n_running <= self.config.max_seqs
        assert len(waiting) == scheduler.n_waiting
        assert scheduler.has_work == bool(self.computed)
        assert sum(scheduler.sequence(s).protected for s in running) <= 1
        assert all((scheduler.why_waiting(s) is None) == (s in running) for s in self.computed)

    def teardown(self) -> None:
        """Whatever is left finishes, and each step brings somebody on."""
        if not hasattr(self, "scheduler"):
            return
        work = sum(len(e.prompt_ids) + e.max_tokens for e in self.entries.values())
        steps = 0
        while self.computed:
            before = self.now_s
            self.now_s += 0.01
            plan = self.scheduler.schedule(self.now_s)
            assert plan.rows or plan.ended, f"nobody came on at {before}"
            self.take(plan)
            self.ledger_balances()
            steps += 1
            assert steps <= (self.config.max_preemptions + 2) * work * max(1, self.config.model_layers), (
                "no end in sight"
            )
        assert self.ledger.free == self.ledger.n_blocks and not self.scheduler.has_work


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
