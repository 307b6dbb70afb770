"""How long a prompt that goes by layers can wait, by integers and a simulated clock: docs/adr/0012 states it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from kvarn.core.ledger import NoRoom
from kvarn.engine.pacing import LOOK_EVERY_STEPS, Pace
from kvarn.engine.scheduler import Scheduler
from kvarn.engine.sequence import Entry, Sequence
from kvarn.engine.step_plan import Row, SchedulerConfig, StepPlan

LAYERS = 30
LONG = 0  # its sequence id


class Ledger:
    """Room for everybody."""

    def never_fits(self, total_tokens: int) -> str | None:
        return None

    def admit(self, seq_id: int, token_ids, namespace: bytes, **more) -> int | NoRoom:
        return 0

    def extend(self, seq_id: int, to_tokens: int) -> NoRoom | None:
        return None

    def fork(self, parent_id: int, child_id: int) -> NoRoom | None:
        return None

    def release(self, seq_id: int) -> None: ...


@dataclass
class Machine:
    """A token of a long prompt costs far more than the pace allows, so each step grants the least."""

    step_tokens: int
    max_seqs: int
    aging_s: float = 0.0
    layers: int = LAYERS
    token_s: float = 0.05
    now_s: float = 0.0
    saw_layers: bool = False
    ids: itertools.count = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_seqs=self.max_seqs,
            step_tokens=self.step_tokens,
            beside_decodes_tokens=self.step_tokens,
            short_tokens=16,
            model_layers=self.layers,
            aging_s=self.aging_s,
            hold_tokens=0,
        )
        self.scheduler = Scheduler(config, Ledger(), Pace(1.9))

    def add(self, prompt: int, new: int, seq_id: int | None = None, priority: int = 0) -> None:
        number = next(self.ids) if seq_id is None else seq_id
        self.scheduler.add(
            Entry(number, tuple(range(prompt)), new, self.now_s, priority=priority, by_layers=number == LONG)
        )

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now_s)
        took_s = 0.006 + sum(self.token_s * r.n_tokens * r.share for r in plan.rows if r.n_tokens > 1)
        self.now_s += took_s
        self.saw_layers |= any(r.layers is not None for r in plan.rows)
        assert self.scheduler.pace is not None
        self.scheduler.pace.note(plan.rows, took_s)
        for row in filter(lambda r: r.complete, plan.rows):
            self.scheduler.advance(row.seq_id, row.n_tokens, (7,) if row.samples else ())
            seq = self.scheduler.sequence(row.seq_id)
            if len(seq.tokens) >= len(seq.entry.prompt_ids) + seq.entry.max_tokens:
                self.scheduler.finish(row.seq_id)
        return plan

    def begin(self, prompt: int, decodes: int, new: int = 10_000) -> Sequence:
        """So many that decode, and a long prompt."""
        for _ in range(decodes):
            self.add(prompt=2, new=new)
        for _ in range(12):
            self.step()
        self.add(prompt, new=4, seq_id=LONG)
        return self.scheduler.sequence(LONG)


def row_of(plan: StepPlan) -> Row | None:
    return next((r for r in plan.rows if r.seq_id == LONG), None)


def most_steps(rows: list[Row], prompt: int) -> int:
    """What docs/adr/0012 promises for a prompt that got these rows, all of which were dear."""
    turns = (prompt + len({r.start for r in rows})) // 2 + 1
    return turns + -(-turns // LOOK_EVERY_STEPS) + 1


@pytest.mark.parametrize(("step_tokens", "max_seqs"), [(512, 64), (128, 64), (96, 64), (80, 64), (48, 32), (40, 20)])
def test_an_endless_stream_of_rows_that_decode_never_holds_a_chunk_up(step_tokens: int, max_seqs: int) -> None:
    """More and more decode beside it, as many as there are places; others come as they go."""
    machine, prompt = Machine(step_tokens, max_seqs), 400
    seq, rows = machine.begin(prompt, decodes=1), list[Row]()
    idle = steps = 0
    while seq.pending_tokens > 1:
        machine.add(prompt=2, new=300 + steps % 9)
        before = seq.progress
        row = row_of(machine.step())
        rows += [row] if row is not None else []
        idle += seq.progress == before
        steps += 1
        assert steps <= 2 * prompt, f"stuck at {seq.progress} with {machine.scheduler.n_running} running"
    assert machine.scheduler.n_running == max_seqs, "they did not crowd"
    assert any(r.layers is not None for r in rows) == (step_tokens > max_seqs + 3)
    assert steps <= most_steps(rows, prompt)
    assert idle <= 1 + steps // LOOK_EVERY_STEPS, "only to look at what decoding takes alone"


@pytest.mark.parametrize("by_layers", [True, False])
@pytest.mark.parametrize("left", [4, 40])
def test_priorities_that_go_first_hold_it_up_no_longer_than_aging(left: int, by_layers: bool) -> None:
    """Without an end, prompts of a higher priority leave no time for it in any step, and little room; those of its own
    that came later are short, so that they pass it. left: tokens of the step for these."""
    machine, prompt = Machine(step_tokens=64, max_seqs=24, aging_s=5.0, layers=LAYERS if by_layers else 0), 40
    seq = machine.begin(prompt, decodes=2)
    machine.step()
    came_on_s, passed = machine.now_s, 0
    while seq.pending_tokens > 1:
        room = machine.step_tokens - 2 - left
        for each in range(0, room, 16):
            machine.add(prompt=min(16, room - each), new=1, priority=1)
        machine.add(prompt=2, new=1)
        before, begun_s = seq.progress, machine.now_s
        plan = machine.step()
        passed += row_of(plan) is None and any(r.n_tokens == 2 for r in plan.rows)
        if seq.progress != before:
            came_on_s = machine.now_s
        assert begun_s - came_on_s <= machine.aging_s + 1.0, f"passed over at {seq.progress}"
    assert passed > 3, "nobody passed it"
    assert by_layers == (seq.computed_tokens > 0 and machine.saw_layers)


def test_where_rows_that_decode_fill_a_step_it_waits_for_one_to_end() -> None:
    machine = Machine(step_tokens=8, max_seqs=12)
    for _ in range(8):
        machine.add(prompt=2, new=60)
    while machine.scheduler.n_waiting or any(s.pending_tokens > 1 for s in machine.scheduler._running):
        machine.step()
    machine.add(prompt=40, new=2, seq_id=LONG)
    machine.add(prompt=2, new=2)
    seq, steps = machine.scheduler.sequence(LONG), 0
    while not seq.computed_tokens:
        assert machine.scheduler.n_running <= 8 + (steps > 40), "nobody is admitted past it"
        machine.step()
        steps += 1
    assert steps <= 64
