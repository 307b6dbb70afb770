"""Requests that begin alike and come at once compute their common beginning once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvarn.core.ledger import NoRoom
from kvarn.engine.holding import common_tokens
from kvarn.engine.reasons import AwaitsPrefix
from kvarn.engine.scheduler import Scheduler
from kvarn.engine.sequence import Entry, Phase
from kvarn.engine.step_plan import SchedulerConfig, StepPlan

BLOCK = 4
SYSTEM = tuple(range(100, 140))  # ten blocks


@dataclass
class Remembering:
    """Room for n_tokens, and all full blocks that were ever computed, by namespace."""

    n_tokens: int = 10_000
    held: dict[int, int] = field(default_factory=dict)
    known: set[tuple[bytes, tuple[int, ...]]] = field(default_factory=set)

    def never_fits(self, total_tokens: int) -> str | None:
        return "too long" if total_tokens > self.n_tokens else None

    def admit(
        self, seq_id: int, token_ids: Sequence[int], namespace: bytes, *, headroom_tokens: int = 0, reuse: bool = True
    ) -> int | NoRoom:
        if (short := len(token_ids) + headroom_tokens + sum(self.held.values()) - self.n_tokens) > 0:
            return NoRoom(short)
        self.held[seq_id] = found = 0
        while reuse and found + BLOCK < len(token_ids) and (namespace, tuple(token_ids[: found + BLOCK])) in self.known:
            found += BLOCK
        return found

    def extend(self, seq_id: int, to_tokens: int) -> NoRoom | None:
        if (short := to_tokens - self.held[seq_id] + sum(self.held.values()) - self.n_tokens) > 0:
            return NoRoom(short)
        self.held[seq_id] = max(self.held[seq_id], to_tokens)
        return None

    def fork(self, parent_id: int, child_id: int) -> NoRoom | None:
        self.held[child_id] = self.held[parent_id]
        return None

    def release(self, seq_id: int) -> None:
        del self.held[seq_id]


class Bench:
    """A scheduler, and how many prompt tokens its steps computed."""

    def __init__(self, n_tokens: int = 10_000, **config: Any) -> None:
        self.ledger = Remembering(n_tokens)
        defaults: dict[str, Any] = {"growth_tokens": 0, "step_tokens": 16, "chunk_tokens": 12, "hold_tokens": 8}
        self.scheduler = Scheduler(SchedulerConfig(**defaults | config), self.ledger)
        self.computed_tokens = self.steps = 0
        self.first_s: dict[int, float] = {}

    def add(self, seq_id: int, prompt: Sequence[int], at: float = 0.0, new: int = 2, **more: Any) -> None:
        given = {"finds_prefix": True, "leaves_prefix": True, "block_tokens": BLOCK} | more
        self.scheduler.add(Entry(seq_id, tuple(prompt), new, at, **given))

    def step(self, now_s: float | None = None) -> StepPlan:
        plan = self.scheduler.schedule(self.steps * 0.01 if now_s is None else now_s)
        self.steps += 1
        for row in plan.rows:
            seq = self.scheduler.sequence(row.seq_id)
            self.computed_tokens += row.n_tokens
            self.scheduler.advance(row.seq_id, row.n_tokens, (7,) if row.samples else ())
            for end in range(BLOCK, seq.computed_tokens + 1, BLOCK):
                self.ledger.known.add((seq.entry.namespace, tuple(seq.tokens[:end])))
            if row.samples:
                self.first_s.setdefault(row.seq_id, self.steps * 0.01)
                if len(seq.tokens) == len(seq.entry.prompt_ids) + seq.entry.max_tokens:
                    self.scheduler.finish(row.seq_id)
        return plan

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
            assert self.steps < 1_000, "no end in sight"


def prompt_of(index: int, system: Sequence[int] = SYSTEM) -> tuple[int, ...]:
    return (*system, index, index, index)


def test_a_shared_beginning_is_computed_once() -> None:
    alike, apart = Bench(step_tokens=64), Bench(step_tokens=64, hold_tokens=0)
    for bench in (alike, apart):
        for index in range(6):
            bench.add(index, prompt_of(index))
        bench.run()
    assert alike.computed_tokens == 40 + 6 * (3 + 1)
    assert apart.computed_tokens > 2 * alike.computed_tokens


def test_who_waits_says_why_and_is_released_when_the_beginning_is_there() -> None:
    bench = Bench()
    bench.add(0, prompt_of(0))
    bench.add(1, prompt_of(1))
    plan = bench.step()
    assert [(h.seq_id, str(h)) for h in plan.held] == [
        (1, "sequence 1 waits: sequence 0 computes the 40 tokens with which both begin (0 so far)")
    ]
    assert (plan.n_waiting, plan.head_wait) == (1, AwaitsPrefix(0, 40, 0))
    assert bench.scheduler.why_waiting(1) == AwaitsPrefix(0, 40, 12)
    assert bench.scheduler.sequence(1).phase is Phase.WAITING
    assert bench.step().head_wait == AwaitsPrefix(0, 40, 12)
    bench.step()
    bench.step()
    plan = bench.step()
    assert [(a.seq_id, a.cached_tokens) for a in plan.admitted] == [(1, 40)]
    assert bench.scheduler.sequence(1).waits == [AwaitsPrefix(0, 40, 0)]


def test_what_shares_nothing_passes_those_that_wait() -> None:
    bench, alone = Bench(step_tokens=64), Bench(step_tokens=64, hold_tokens=0)
    for each in (bench, alone):
        each.add(0, prompt_of(0))
        each.add(1, prompt_of(1))
        each.add(2, range(12))
    plan = bench.step()
    assert [r.seq_id for r in plan.rows] == [0, 2]
    alone.step()
    assert bench.first_s[2] <= alone.first_s.get(2, 0.02)


@pytest.mark.parametrize(
    "second",
    [
        {"namespace": b"another tenant"},
        {"finds_prefix": False},
        {"reuse_prompt": False},
        {"prompt": (*SYSTEM[:7], *range(36))},  # one block alike: less than is worth a wait
        {"priority": 1},  # goes before the first
    ],
    ids=lambda given: next(iter(given)),
)
def test_who_would_find_nothing_does_not_wait(second: dict[str, Any]) -> None:
    bench = Bench(step_tokens=100)
    bench.add(0, prompt_of(0))
    bench.step()
    bench.add(2, prompt_of(2, range(200, 320)))
    bench.step()
    bench.add(1, second.pop("prompt", prompt_of(1, range(200, 320))), **second)
    plan = bench.step()
    assert not plan.held and 1 in {r.seq_id for r in plan.rows} | {a.seq_id for a in plan.admitted}


@pytest.mark.parametrize("leader", [{"leaves_prefix": False}, {"reuse_prompt": False}], ids=lambda g: next(iter(g)))
def test_nobody_waits_for_one_that_leaves_nothing(leader: dict[str, Any]) -> None:
    bench = Bench()
    bench.add(0, prompt_of(0), **leader)
    bench.add(1, prompt_of(1))
    assert not bench.step().held


@pytest.mark.parametrize("end", ["cancel", "restart"])
def test_when_the_first_one_goes_the_next_goes_on(end: str) -> None:
    bench = Bench()
    for index in range(4):
        bench.add(index, prompt_of(index))
    bench.step()
    getattr(bench.scheduler, end)(0)
    plan = bench.step()
    if end == "cancel":
        assert [(a.seq_id, a.cached_tokens) for a in plan.admitted] == [(1, 12)], "with what the first one left"
        assert {h.seq_id for h in plan.held} == {2, 3}
    bench.run()
    assert bench.computed_tokens <= 40 + 12 + 4 * (3 + 1)


def test_a_first_one_that_does_not_come_on_is_not_waited_for() -> None:
    bench = Bench(n_tokens=60, hold_s=0.5, step_tokens=30)
    bench.add(9, range(300, 316), new=30)
    bench.add(0, prompt_of(0), at=1)
    bench.step(0.0)
    bench.add(1, prompt_of(1), at=2)
    seen = []
    for step in range(1, 90):
        plan = bench.step(step * 0.1)
        seen.append((bool(plan.held), bench.scheduler.find(1) is None))
    assert seen[-1] == (False, True) and not bench.scheduler.has_work


def test_a_waiting_one_can_be_cancelled_and_expires() -> None:
    bench = Bench()
    bench.add(0, prompt_of(0), new=30)
    bench.add(1, prompt_of(1))
    bench.add(2, prompt_of(2), deadline_s=0.005)
    bench.step(0.0)
    assert bench.scheduler.n_waiting == 2
    assert bench.scheduler.cancel(1) and bench.scheduler.n_waiting == 1
    assert [e.seq_id for e in bench.step(0.01).ended] == [2]
    assert bench.scheduler.n_waiting == 0
    bench.run()


def test_common_beginnings() -> None:
    text = list(range(50))
    assert common_tokens(text, text, 4) == 48
    assert common_tokens(text[:48], text, 4) == 44, "the last token is left to compute"
    assert common_tokens(text, text[:17], 4) == 16
    assert common_tokens(text, [*text[:21], 0, *text[22:]], 4) == 20
    assert common_tokens(text, [1, *text], 4) == 0
    assert common_tokens([1, 2], [1, 2], 4) == 0
