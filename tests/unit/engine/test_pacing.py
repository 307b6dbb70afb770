"""What a prompt may cost those that decode, learned from made-up durations."""

from __future__ import annotations

import pytest

from kvarn.engine.pacing import LEAST_TOKENS, Pace
from kvarn.engine.step_plan import Row


def rows(decodes: int, prompt_tokens: int = 0) -> list[Row]:
    prompt = [Row(99, 0, prompt_tokens, False)] if prompt_tokens else []
    return [Row(i, 100, 1, True) for i in range(decodes)] + prompt


def run(pace: Pace, decodes: int, decode_s: float, token_s: float, steps: int) -> list[float]:
    """Slowdown of each of so many mixed steps."""
    found = []
    for _ in range(steps):
        tokens = pace.tokens(decodes) or 48
        took_s = decode_s + token_s * tokens
        pace.note(rows(decodes, tokens), took_s)
        found.append(took_s / decode_s)
    return found


def test_nothing_is_known_at_first() -> None:
    pace = Pace(2.4)
    assert pace.tokens(4) is None
    pace.note(rows(4, 32), 0.1)
    assert pace.tokens(4) is None, "no step has decoded alone"
    pace.note(rows(4), 0.01)
    assert pace.tokens(4) is None, "no prompt token has been paid for"


@pytest.mark.parametrize(("decode_s", "token_s"), [(0.005, 0.001), (0.05, 0.001), (0.02, 0.00005)])
def test_steps_keep_to_the_slowdown_whatever_the_machine(decode_s: float, token_s: float) -> None:
    pace = Pace(2.4)
    for _ in range(5):
        pace.note(rows(8), decode_s)
    slowdowns = run(pace, 8, decode_s, token_s, 20)
    assert max(slowdowns[1:]) <= 2.4
    assert slowdowns[-1] > 2.2 or decode_s / token_s < 10


def test_tokens_that_become_dearer_become_fewer() -> None:
    pace = Pace(2.4)
    pace.note(rows(8), 0.01)
    cost_s = 0.0005
    for _ in range(100):
        cost_s *= 1.02
        assert run(pace, 8, 0.01, cost_s, 1)[0] < 3 or pace.tokens(8) == LEAST_TOKENS or cost_s < 0.00052


def test_a_prompt_always_comes_on() -> None:
    pace = Pace(2.4)
    pace.note(rows(1), 0.001)
    run(pace, 1, 0.001, 0.1, 3)
    assert pace.tokens(1) == LEAST_TOKENS


def test_one_long_pause_changes_little() -> None:
    pace = Pace(2.4)
    for _ in range(10):
        pace.note(rows(8), 0.01)
    run(pace, 8, 0.01, 0.001, 5)
    before = pace.tokens(8)
    pace.note(rows(8), 0.1)
    assert before is not None and (pace.tokens(8) or 0) < 1.5 * before


def test_other_numbers_of_rows_are_told_from_the_nearest() -> None:
    pace = Pace(2.0)
    pace.note(rows(8), 0.008)
    pace.note(rows(8, 10), 0.018)
    assert (pace.tokens(8), pace.tokens(64)) == (8, 8)
    assert pace.tokens(2) == LEAST_TOKENS
