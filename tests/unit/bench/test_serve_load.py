"""The load is drawn from its seed alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvarn.bench.serve_load import LoadSpec, draw_load, parse_lengths
from kvarn.core.errors import InvalidRequest

SPEC = LoadSpec(50, turns=3, rate_per_s=4.0, system_tokens=20, prompt_tokens=parse_lengths("5:9"), think_s=1.0)


def test_same_seed_same_load() -> None:
    assert draw_load(SPEC) == draw_load(SPEC)
    assert draw_load(SPEC) != draw_load(replace(SPEC, seed=1))


def test_shape_of_the_load() -> None:
    load = draw_load(SPEC)
    assert len(load) == 50
    assert len({c.system for c in load}) == 1
    assert load[0].system is not None and len(load[0].system.split()) == 20
    for conversation in load:
        assert len(conversation.turns) == 3
        assert all(5 <= len(t.text.split()) <= 9 for t in conversation.turns)
        assert conversation.turns[0].pause_s == 0
    assert len({c.turns[0].text for c in load}) > 45


def test_arrivals_are_poisson() -> None:
    """Mean and standard deviation of the gaps both equal 1 / rate, within 5 standard errors."""
    load = draw_load(LoadSpec(4_000, rate_per_s=4.0, prompt_tokens=parse_lengths("1")))
    times = [c.arrival_s for c in load]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, abs=5 * 0.25 / 4_000**0.5)
    assert deviation == pytest.approx(0.25, rel=0.15)


def test_a_closed_loop_has_no_arrivals() -> None:
    assert {c.arrival_s for c in draw_load(LoadSpec(5))} == {0.0}


@pytest.mark.parametrize("text", ["", "x", "0", "5:2", "-1", "1:2:3"])
def test_bad_lengths(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_lengths(text)


@pytest.mark.parametrize(("name", "value"), [("conversations", 0), ("turns", 0), ("users", 0), ("rate_per_s", 0.0)])
def test_bad_specs(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest):
        replace(SPEC, **{name: value})
