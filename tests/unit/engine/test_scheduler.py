"""The scheduler against a simple ledger and a simulated clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvarn.core.errors import DoesNotFit, IncompatiblePlan, InvalidRequest
from kvarn.core.ledger import NoRoom
from kvarn.engine.pacing import Pace
from kvarn.engine.prices import Allowance, TokenAllowance
from kvarn.engine.reasons import AwaitsParent, Behind, Expired, NoBlocks, NoBudget, NoSlot, OutOfRoom, RanOut, Stalled
from kvarn.engine.scheduler import Scheduler
from kvarn.engine.sequence import Entry, Phase
from kvarn.engine.step_plan import Row, SchedulerConfig, StepPlan

BLOCK = 4


class Ledger:
    """Blocks of BLOCK tokens, counted; `cached` maps a sequence to what the prefix index would find for it."""

    def __init__(self, n_blocks: int, cached: dict[int, int] | None = None) -> None:
        self.n_blocks, self.cached = n_blocks, cached or {}
        self.held: dict[int, int] = {}
        self.asked_reuse: dict[int, bool] = {}

    @property
    def free(self) -> int:
        return self.n_blocks - sum(self.held.values())

    def never_fits(self, total_tokens: int) -> str | None:
        need = -(-total_tokens // BLOCK)
        return f"it takes {need} blocks of {self.n_blocks}" if need > self.n_blocks else None

    def admit(
        self, seq_id: int, token_ids: Sequence[int], namespace: bytes, *, headroom_tokens: int = 0, reuse: bool = True
    ) -> int | NoRoom:
        assert seq_id not in self.held
        need = -(-len(token_ids) // BLOCK) + -(-headroom_tokens // BLOCK)
        if need > self.free:
            return NoRoom(need - self.free)
        self.held[seq_id], self.asked_reuse[seq_id] = 0, reuse
        return min(self.cached.get(seq_id, 0), len(token_ids) - 1) if reuse else 0

    def extend(self, seq_id: int, to_tokens: int) -> NoRoom | None:
        more = max(0, -(-to_tokens // BLOCK) - self.held[seq_id])
        if more > self.free:
            return NoRoom(more - self.free)
        self.held[seq_id] += more
        return None

    def fork(self, parent_id: int, child_id: int) -> NoRoom | None:
        if self.free < self.held[parent_id]:
            return NoRoom(self.held[parent_id] - self.free)
        self.held[child_id] = self.held[parent_id]
        return None

    def release(self, seq_id: int) -> None:
        del self.held[seq_id]


def entry(seq_id: int, prompt: int = 4, new: int = 4, at: float = 0.0, **more) -> Entry:
    return Entry(seq_id, tuple(range(prompt)), new, at, **more)


def make(n_blocks: int = 1000, cached: dict[int, int] | None = None, **config: Any) -> tuple[Scheduler, Ledger]:
    ledger = Ledger(n_blocks, cached)
    return Scheduler(SchedulerConfig(**{"growth_tokens": 0} | config), ledger), ledger


def run_step(scheduler: Scheduler, now_s: float = 0.0) -> StepPlan:
    """One step of an engine whose model always says 7 and that ends a sequence after max_tokens."""
    plan = scheduler.schedule(now_s)
    for row in plan.rows:
        scheduler.advance(row.seq_id, row.n_tokens, (7,) if row.samples else ())
        for child in row.children:
            scheduler.fork(child, (7,))
    for seq_id in {s for row in plan.rows for s in (row.seq_id, *row.children)}:
        seq = scheduler.sequence(seq_id)
        if len(seq.tokens) >= len(seq.entry.prompt_ids) + seq.entry.max_tokens:
            scheduler.finish(seq_id)
    return plan


def run_all(scheduler: Scheduler, limit: int = 10_000) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plans.append(run_step(scheduler, now_s=len(plans) * 0.01))
        assert len(plans) < limit, "no end in sight"
    return plans


def rows_of(plan: StepPlan) -> dict[int, tuple[int, int]]:
    return {row.seq_id: (row.start, row.n_tokens) for row in plan.rows}


def test_first_come_first_served_within_the_budget():
    scheduler, _ = make(step_tokens=10)
    for seq_id in range(3):
        scheduler.add(entry(seq_id, prompt=4, at=seq_id))
    plan = run_step(scheduler)
    assert [(r.seq_id, r.start, r.n_tokens, r.samples) for r in plan.rows] == [
        (0, 0, 4, True),
        (1, 0, 4, True),
        (2, 0, 2, False),
    ]
    plan = run_step(scheduler)
    assert plan.rows[2] == Row(2, 2, 2, True)


def test_decodes_come_first_and_a_long_prompt_gets_the_rest():
    scheduler, _ = make(step_tokens=8)
    scheduler.add(entry(0, prompt=2, new=10))
    run_step(scheduler)
    scheduler.add(entry(1, prompt=30, at=1))
    plans = [run_step(scheduler, 1.0) for _ in range(5)]
    assert all(p.rows[0] == Row(0, 2 + i, 1, True) for i, p in enumerate(plans))
    assert [rows_of(p)[1] for p in plans] == [(0, 7), (7, 7), (14, 7), (21, 7), (28, 2)]


def test_prefill_beside_decodes_has_its_own_limit():
    scheduler, _ = make(step_tokens=100, beside_decodes_tokens=5, chunk_tokens=40)
    scheduler.add(entry(0, prompt=80, new=10))
    assert rows_of(run_step(scheduler)) == {0: (0, 40)}
    assert rows_of(run_step(scheduler)) == {0: (40, 40)}
    scheduler.add(entry(1, prompt=80, at=1))
    assert rows_of(run_step(scheduler)) == {0: (80, 1), 1: (0, 5)}


def test_prefill_beside_decodes_grows_with_them():
    scheduler, _ = make(step_tokens=100, beside_decodes_tokens=5, prefill_per_decode=3, chunk_tokens=40)
    for seq_id in range(2):
        scheduler.add(entry(seq_id, prompt=4, new=10))
    run_step(scheduler)
    scheduler.add(entry(2, prompt=80, at=1))
    assert rows_of(run_step(scheduler)) == {0: (4, 1), 1: (4, 1), 2: (0, 11)}


def test_prompts_beside_patient_rows_get_all_of_the_step():
    scheduler, _ = make(step_tokens=100, beside_decodes_tokens=5)
    scheduler.add(entry(0, prompt=4, new=10, patient=True))
    run_step(scheduler)
    scheduler.add(entry(1, prompt=80, at=1))
    assert rows_of(run_step(scheduler)) == {0: (4, 1), 1: (0, 80)}
    scheduler.add(entry(2, prompt=80, at=2, patient=True))
    assert rows_of(run_step(scheduler)) == {0: (5, 1), 1: (80, 1), 2: (0, 5)}, "one of the rows is watched"


class Slow(Pace):
    """So many tokens of long prompts a step."""

    def __init__(self, tokens: int) -> None:
        super().__init__(2.0)
        self._tokens = tokens

    def allowance(self, decodes: int) -> Allowance:
        return TokenAllowance(self._tokens)


def test_long_prompts_keep_the_pace_and_short_ones_pass():
    scheduler, _ = make(step_tokens=100, beside_decodes_tokens=20, short_tokens=10)
    scheduler.pace = Slow(6)
    scheduler.add(entry(0, prompt=4, new=10))
    run_step(scheduler)
    scheduler.add(entry(1, prompt=15, at=1))
    scheduler.add(entry(2, prompt=9, at=2))
    assert rows_of(run_step(scheduler)) == {0: (4, 1), 1: (0, 6), 2: (0, 9)}
    assert rows_of(run_step(scheduler))[1] == (6, 6), "the end of a long prompt costs more than a short one"
    assert rows_of(run_step(scheduler))[1] == (12, 3)


def test_short_prompts_pass_a_long_one_that_the_pace_leaves_nothing():
    scheduler, _ = make(step_tokens=100, beside_decodes_tokens=20, short_tokens=10)
    scheduler.pace = Slow(6)
    scheduler.add(entry(0, prompt=4, new=10))
    run_step(scheduler)
    for seq_id, prompt in ((1, 40), (2, 40), (3, 9)):
        scheduler.add(entry(seq_id, prompt=prompt, at=seq_id))
    plan = run_step(scheduler)
    assert rows_of(plan) == {0: (4, 1), 1: (0, 6), 3: (0, 9)}
    assert [a.seq_id for a in plan.admitted] == [1, 2, 3]


def test_what_was_mostly_found_in_the_cache_is_short():
    scheduler, _ = make(step_tokens=100, beside_decodes_tokens=20, short_tokens=10, cached={1: 92})
    scheduler.pace = Slow(0)
    scheduler.add(entry(0, prompt=4, new=10))
    run_step(scheduler)
    scheduler.add(entry(1, prompt=100, at=1))
    assert rows_of(run_step(scheduler)) == {0: (4, 1), 1: (92, 8)}


@pytest.mark.parametrize("step_tokens", [1, 2, 3, 7, 512])
def test_every_token_is_computed_once_at_any_chunk_size(step_tokens: int):
    scheduler, ledger = make(step_tokens=step_tokens)
    for seq_id in range(5):
        scheduler.add(entry(seq_id, prompt=1 + 3 * seq_id, new=3, at=seq_id))
    computed = {seq_id: [] for seq_id in range(5)}
    for plan in run_all(scheduler):
        assert sum(r.n_tokens for r in plan.rows) <= step_tokens
        for row in plan.rows:
            computed[row.seq_id] += range(row.start, row.start + row.n_tokens)
    assert computed == {seq_id: list(range(3 * seq_id + 3)) for seq_id in range(5)}
    assert ledger.free == ledger.n_blocks


def test_cached_tokens_are_not_computed():
    scheduler, ledger = make(cached={1: 100, 2: 12})
    scheduler.add(entry(1, prompt=16))
    scheduler.add(entry(2, prompt=16, at=1, reuse_prompt=False))
    plan = run_step(scheduler)
    assert rows_of(plan) == {1: (15, 1), 2: (0, 16)}
    assert [(a.seq_id, a.cached_tokens) for a in plan.admitted] == [(1, 15), (2, 0)]
    assert ledger.asked_reuse == {1: True, 2: False}


def test_what_can_never_fit_is_refused_with_the_ways_out():
    scheduler, _ = make(n_blocks=5, context_tokens=64)
    with pytest.raises(DoesNotFit, match="exceed the context of 64") as refused:
        scheduler.add(entry(0, prompt=50, new=20))
    assert refused.value.fixes[:2] == ("max_tokens of at most 14", "a prompt of at most 44 tokens")
    with pytest.raises(DoesNotFit, match="6 blocks of 5") as refused:
        scheduler.add(entry(0, prompt=10, new=12))
    assert refused.value.fixes[:2] == ("max_tokens of at most 11", "a prompt of at most 9 tokens")
    assert not scheduler.has_work
    for prompt, new in ((10, 11), (9, 12)):  # the ways out lead somewhere
        scheduler.add(entry(prompt, prompt, new))
    run_all(scheduler)


def test_bad_values_are_refused():
    with pytest.raises(InvalidRequest):
        entry(0, prompt=0)
    with pytest.raises(InvalidRequest):
        entry(0, new=0)
    with pytest.raises(IncompatiblePlan, match="step_tokens is 0"):
        SchedulerConfig(step_tokens=0)
    with pytest.raises(IncompatiblePlan, match="aging_s is -1"):
        SchedulerConfig(aging_s=-1)


def test_a_preempted_sequence_computes_its_tokens_again_and_the_older_one_keeps_its_blocks():
    scheduler, _ = make(n_blocks=4)
    scheduler.add(entry(0, prompt=8, new=8))
    scheduler.add(entry(1, prompt=7, new=8, at=1))
    run_step(scheduler)  # both prompts: 2 blocks each
    plan = run_step(scheduler)  # 0 takes a third block from 1
    assert [(p.seq_id, p.for_seq, p.lost_tokens, p.times) for p in plan.preempted] == [(1, 0, 7, 1)]
    assert rows_of(plan) == {0: (8, 1)}
    assert isinstance(plan.head_wait, RanOut)
    assert scheduler.sequence(1).phase is Phase.WAITING
    plans = run_all(scheduler)
    assert not any(p.preempted for p in plans)
    assert isinstance(plans[0].head_wait, NoBlocks)
    again = next(p for p in plans if any(r.seq_id == 1 for r in p.rows))
    assert rows_of(again)[1] == (0, 8)  # the prompt and the token that was generated


def test_the_last_one_pauses_instead_of_preempting_those_before_it():
    scheduler, _ = make(n_blocks=4)
    scheduler.add(entry(0, prompt=5, new=4))
    scheduler.add(entry(1, prompt=8, new=3, at=1))
    run_step(scheduler)
    plan = run_step(scheduler)
    assert rows_of(plan) == {0: (5, 1)}
    assert plan.stalled == (Stalled(1, NoRoom(1)),)
    plans = run_all(scheduler)
    assert not any(p.preempted for p in plans)


def test_preemptions_are_bounded_and_everyone_finishes():
    scheduler, ledger = make(n_blocks=8, max_preemptions=2, step_tokens=6)
    for seq_id in range(12):
        scheduler.add(entry(seq_id, prompt=3 + seq_id % 5, new=20, at=seq_id))
    plans = run_all(scheduler)
    times = [p.times for plan in plans for p in plan.preempted]
    assert times and max(times) <= 2
    assert ledger.free == 8


def test_zero_preemptions_means_one_at_a_time():
    scheduler, _ = make(n_blocks=8, max_preemptions=0)
    for seq_id in range(4):
        scheduler.add(entry(seq_id, prompt=3, new=20, at=seq_id))
    assert not any(p.preempted for p in run_all(scheduler))


def test_priority_goes_first_and_makes_room():
    scheduler, _ = make(max_seqs=1)
    scheduler.add(entry(0, new=50))
    scheduler.add(entry(1, at=1))
    run_step(scheduler)
    assert isinstance(scheduler.why_waiting(1), NoSlot)
    scheduler.add(entry(2, at=2, priority=1))
    plan = run_step(scheduler)
    assert rows_of(plan) == {2: (0, 4)}
    assert [(p.seq_id, p.for_seq) for p in plan.preempted] == [(0, 2)]


def test_a_priority_that_is_passed_over_rises():
    scheduler, _ = make(max_seqs=1, aging_s=10.0)
    scheduler.add(entry(0, new=1))
    turns = []
    for second in range(1, 70):
        scheduler.add(entry(second, at=second, new=1, priority=2))
        if second == 30:
            scheduler.add(entry(100, at=second, new=2))
        turns += [(second, r.seq_id) for r in run_step(scheduler, second).rows]
    # nothing but aging lets 0 in: after 20 s of being passed over its priority 0 counts as 2, and it came first;
    # then its priority starts anew
    assert [turn for turn in turns if turn[1] in (0, 100)] == [(21, 0), (50, 100), (51, 100)]


def test_aging_does_not_let_a_greedy_tenant_pass_others_of_its_priority():
    scheduler, _ = make(step_tokens=10, aging_s=10.0)
    for seq_id in range(6):
        scheduler.add(entry(seq_id, prompt=10, new=1, tenant="greedy"))
    run_step(scheduler, 0.0)
    scheduler.add(entry(9, prompt=10, new=1, at=100.0, tenant="modest"))
    run_step(scheduler, 100.0)
    assert rows_of(run_step(scheduler, 100.1)) == {9: (0, 10)}


def test_tenants_share_by_tokens():
    scheduler, _ = make(step_tokens=10)
    for seq_id in range(8):
        scheduler.add(entry(seq_id, prompt=10, new=1, tenant="greedy"))
    for seq_id in range(8, 12):
        scheduler.add(entry(seq_id, prompt=10, new=1, at=1, tenant="modest"))
    order = [plan.rows[0].seq_id for plan in run_all(scheduler)]
    assert order == [0, 8, 1, 9, 2, 10, 3, 11, 4, 5, 6, 7]


def test_a_tenant_that_comes_later_gets_no_credit_for_its_absence():
    scheduler, _ = make(step_tokens=10)
    for seq_id in range(6):
        scheduler.add(entry(seq_id, prompt=10, new=1, tenant="early"))
    for _ in range(3):
        run_step(scheduler)
    for seq_id in range(6, 9):
        scheduler.add(entry(seq_id, prompt=10, new=1, at=1, tenant="late"))
    order = [plan.rows[0].seq_id for plan in run_all(scheduler)]
    assert order == [3, 6, 4, 7, 5, 8]


def test_a_long_prompt_of_one_tenant_does_not_hold_up_another():
    scheduler, _ = make(step_tokens=10)
    scheduler.add(entry(0, prompt=100, new=1, tenant="a"))
    run_step(scheduler)
    scheduler.add(entry(1, prompt=10, new=1, at=1, tenant="b"))
    plans = [run_step(scheduler) for _ in range(3)]
    assert any(r.seq_id == 1 and r.samples for p in plans for r in p.rows)


def test_nobody_passes_the_first_that_does_not_fit():
    scheduler, _ = make(n_blocks=6)
    scheduler.add(entry(0, prompt=12, new=4))
    run_step(scheduler)
    scheduler.add(entry(1, prompt=20, new=1, at=1))
    scheduler.add(entry(2, prompt=1, new=1, at=2))
    plan = run_step(scheduler)
    assert rows_of(plan) == {0: (12, 1)}
    assert plan.head_wait == scheduler.why_waiting(1) == NoBlocks(NoRoom(3), 20, 0)
    assert scheduler.why_waiting(2) == Behind(1)


def test_admission_leaves_room_for_what_the_running_ones_still_take():
    scheduler, _ = make(n_blocks=10, step_tokens=8)
    scheduler.add(entry(0, prompt=32, new=1))
    run_step(scheduler)  # two of its eight blocks
    scheduler.add(entry(1, prompt=12, new=1, at=1, priority=0))
    plan = run_step(scheduler)
    assert rows_of(plan) == {0: (8, 8)}
    while scheduler.sequence(0).pending_tokens > 8:
        run_step(scheduler)
    assert isinstance(scheduler.why_waiting(1), NoBudget | NoBlocks)
    assert not any(p.preempted for p in run_all(scheduler))


def test_deadlines_end_what_waits_runs_and_is_unborn():
    scheduler, ledger = make(max_seqs=2)
    scheduler.add(entry(0, new=50, deadline_s=5.0))
    scheduler.add(entry(1, prompt=2000, at=1, deadline_s=4.0, child_ids=(11,)))
    scheduler.add(entry(2, at=2, deadline_s=6.0))
    run_step(scheduler, 3.0)
    plan = run_step(scheduler, 5.5)
    assert set(plan.ended) == {Expired(0, 5.0, 5.5), Expired(1, 4.0, 5.5), Expired(11, 4.0, 5.5)}
    assert rows_of(plan) == {2: (0, 4)}
    assert set(ledger.held) == {2}


def test_children_share_the_prompt():
    scheduler, ledger = make()
    scheduler.add(entry(0, prompt=6, new=3, child_ids=(1, 2)))
    assert scheduler.why_waiting(1) == AwaitsParent(0)
    plan = run_step(scheduler)
    assert plan.rows == (Row(0, 0, 6, True, (1, 2)),)
    assert rows_of(run_step(scheduler)) == {0: (6, 1), 1: (6, 1), 2: (6, 1)}
    run_all(scheduler)
    assert ledger.free == ledger.n_blocks


def test_children_without_room_compute_the_prompt_themselves():
    scheduler, ledger = make(n_blocks=3)
    scheduler.add(entry(0, prompt=6, new=3, child_ids=(1,)))
    run_step(scheduler)
    assert scheduler.sequence(1).phase is Phase.WAITING
    assert scheduler.sequence(1).tokens == [0, 1, 2, 3, 4, 5, 7]
    plans = run_all(scheduler)
    assert any(r == Row(1, 0, 7, True) for p in plans for r in p.rows)
    assert ledger.free == 3


def test_more_children_than_slots_take_turns():
    scheduler, _ = make(max_seqs=2)
    scheduler.add(entry(0, prompt=6, new=3, child_ids=(1, 2, 3)))
    plans = run_all(scheduler)
    assert max(len(p.rows) for p in plans) == 2
    assert {r.seq_id for p in plans for r in p.rows} == {0, 1, 2, 3}


def test_more_decodes_than_tokens_a_step_take_turns():
    scheduler, _ = make(step_tokens=3)
    scheduler.add(entry(0, prompt=3, new=4, child_ids=(1, 2, 3, 4)))
    assert max(sum(r.n_tokens for r in p.rows) for p in run_all(scheduler)) == 3


def test_a_child_takes_its_cancelled_parents_place():
    scheduler, ledger = make(step_tokens=4)
    scheduler.add(entry(0, prompt=6, new=3, child_ids=(1, 2)))
    run_step(scheduler)
    assert scheduler.cancel(0)
    assert ledger.free == ledger.n_blocks
    plans = run_all(scheduler)
    assert Row(1, 4, 2, True, (2,)) in plans[1].rows


@pytest.mark.parametrize("steps", range(8))
def test_cancel_in_every_state_gives_everything_back(steps: int):
    scheduler, ledger = make(n_blocks=6, step_tokens=4)
    for seq_id in range(4):
        scheduler.add(entry(seq_id, prompt=6, new=8, at=seq_id, child_ids=(10 + seq_id,)))
    for _ in range(steps):
        run_step(scheduler)
    phases = [scheduler.sequence(s).phase for s in (*range(4), *range(10, 14))]
    assert Phase.WAITING in phases
    for seq_id in (*range(4), *range(10, 14)):
        assert scheduler.cancel(seq_id)
        assert not scheduler.cancel(seq_id)
    assert not scheduler.has_work and not scheduler.n_running and not scheduler.n_waiting
    assert ledger.free == 6
    assert scheduler.schedule(0.0) == StepPlan(())


def test_a_row_of_a_cancelled_sequence_is_passed_over():
    scheduler, _ = make()
    scheduler.add(entry(0))
    scheduler.add(entry(1, at=1))
    plan = scheduler.schedule(0.0)
    scheduler.cancel(0)
    for row in plan.rows:
        scheduler.advance(row.seq_id, row.n_tokens, (7,))
    assert rows_of(scheduler.schedule(0.0)) == {1: (4, 1)}


def test_without_a_cache_rows_start_at_zero_and_are_never_cut():
    scheduler, _ = make(step_tokens=8, recompute_all=True, cached={0: 3})
    for seq_id in range(3):
        scheduler.add(entry(seq_id, prompt=4, new=3, at=seq_id))
    assert rows_of(run_step(scheduler)) == {0: (0, 4), 1: (0, 4)}
    assert rows_of(run_step(scheduler)) == {0: (0, 5)}
    plans = run_all(scheduler)
    assert all(r.start == 0 and r.samples for p in plans for r in p.rows)
    scheduler.add(entry(9, prompt=50, new=2))
    assert [rows_of(p) for p in run_all(scheduler)] == [{9: (0, 50)}, {9: (0, 51)}]


def test_a_ledger_that_breaks_its_word_ends_the_sequence_not_the_engine():
    scheduler, ledger = make(n_blocks=10)
    scheduler.add(entry(0, prompt=4, new=20))
    run_step(scheduler)
    scheduler.add(entry(1, prompt=4, new=20, at=1))
    ledger.n_blocks = 1
    ended = [e for _ in range(3) for e in run_step(scheduler).ended]
    assert [e.seq_id for e in ended] == [0, 1]
    assert all(isinstance(e, OutOfRoom) for e in ended)
    assert not scheduler.has_work


def test_reasons_read_as_sentences():
    scheduler, _ = make(n_blocks=4)
    scheduler.add(entry(0, prompt=8, new=8))
    scheduler.add(entry(1, prompt=7, new=8, at=1))
    run_step(scheduler)
    (why,) = run_step(scheduler).preempted
    assert str(why) == (
        "sequence 1 gave its blocks to sequence 0; 7 tokens will be computed again (preemption 1 of at most 4)"
    )
    run_step(scheduler)
    assert str(scheduler.why_waiting(1)) == "8 tokens beside 0 of those running: short of 1 blocks"
    assert scheduler.sequence(1).preemptions == [why]
    assert [type(w) for w in scheduler.sequence(1).waits] == [RanOut, NoBlocks]


def test_without_preemptions_children_take_turns_too():
    scheduler, _ = make(max_preemptions=0)
    scheduler.add(entry(0, prompt=6, new=3, child_ids=(1, 2)))
    plans = run_all(scheduler)
    assert all(len(p.rows) == 1 for p in plans)
    assert {r.seq_id for p in plans for r in p.rows} == {0, 1, 2}


@pytest.mark.parametrize("rival", [{"priority": 5}, {"tenant": "other"}, {"prompt": 1}, {"priority": 5, "prompt": 12}])
def test_nobody_starves_under_an_endless_stream_of_others(rival: dict):
    scheduler, _ = make(n_blocks=12, max_seqs=3, step_tokens=8, aging_s=1.0)
    scheduler.add(entry(0, prompt=20, new=12))
    for step in range(1, 4000):
        scheduler.add(entry(step, at=step * 0.05, **{"prompt": 6, "new": 3} | rival))
        run_step(scheduler, step * 0.05)
        if not any(s == 0 for s in scheduler._seqs):
            break
    else:
        pytest.fail(f"sequence 0 still waits after 200 s: {scheduler.why_waiting(0)}")
