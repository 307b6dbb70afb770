"""Speeds are measured so that what else the machine does meets all choices alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvarn.evals.scoring import Usage
from kvarn.evals.tasks.base import Settings, error_of
from kvarn.evals.tasks.speed import NEW_TOKENS, TASK, TURNS
from kvarn.evals.texts import shipped_text
from support.models import byte_tokenizer

SETTINGS = Settings(text=shipped_text("alice.txt")[:600], context_tokens=64, stride_tokens=24)


class Machine:
    """Each step on it takes longer than the one before."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, cost_s: float) -> float:
        self.steps += 1
        return cost_s * (1 + self.steps / 20)


def bench(machine: Machine, cost_s: float) -> Any:
    def decode(prompt: Sequence[int], new_tokens: int) -> Iterator[float]:
        for _ in range(new_tokens - 1):
            yield machine.step(cost_s)
        usages.append(Usage(len(prompt) + new_tokens - 1, 100, 100))

    usages: list[Usage] = []
    return SimpleNamespace(scorer=SimpleNamespace(decode=decode, usages=usages), tokenizer=byte_tokenizer())


def test_a_machine_that_slows_down_is_no_choices_fault() -> None:
    """One after the other, the second would seem half as fast as the first, with the same cost."""
    machine = Machine()
    first, second, slow = TASK.together([bench(machine, c) for c in (0.01, 0.01, 0.02)], SETTINGS)
    rates = [values[0].value for values in (first, second, slow)]
    assert machine.steps == 3 * (NEW_TOKENS - 1)
    assert rates[1] == pytest.approx(rates[0], rel=0.15)
    assert rates[2] == pytest.approx(rates[0] / 2, rel=0.25)


def test_the_error_of_a_speed_comes_from_its_turns() -> None:
    (values,) = TASK.together([bench(Machine(), 0.01)], SETTINGS)
    assert len(values[0].samples) == TURNS
    error = error_of(values[0])
    assert error is not None and error > 0.05 * values[0].value  # the machine grows slower from turn to turn
