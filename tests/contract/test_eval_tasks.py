"""What every evaluation task keeps to, for every file in evals/tasks."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from kvarn.evals.scoring import Scorer
from kvarn.evals.tasks.base import Bench, Settings, Value, load_task, task_names
from kvarn.evals.texts import shipped_text
from support.engines import make_engine
from support.models import byte_tokenizer

TRAINED = 96
SETTINGS = Settings(
    text=shipped_text("alice.txt")[:3000],
    lengths=(240, 260),
    depths=(0.0, 0.5, 1.0),
    context_tokens=64,
    stride_tokens=24,
    windows=2,
    cases=2,
    stream_tokens=130,
)
pytestmark = pytest.mark.parametrize("name", task_names())


def measure(name: str, kv: str, settings: Settings = SETTINGS) -> tuple[list[Value], Bench, list[int]]:
    """Values, the bench, and how many tokens each engine computed at a time."""
    context = load_task(name).context_tokens(settings, TRAINED)
    ticks: list[int] = []
    full = Scorer(make_engine(context_tokens=context, kv="full", block_size=8, max_seqs=1), ticks.append)
    scorer = Scorer(make_engine(context_tokens=context, kv=kv, block_size=8, max_seqs=1), ticks.append)
    bench = Bench(scorer, full, byte_tokenizer(), TRAINED, drops=":" in kv)
    return list(load_task(name).run(bench, settings)), bench, ticks


def comparable(values: list[Value]) -> list[tuple[str, float, int, dict[str, float]]]:
    return [(v.metric, v.value, v.n, dict(v.detail)) for v in values if "per_s" not in v.metric]


def test_it_measures_what_it_shows(name: str) -> None:
    task = load_task(name)
    values, bench, _ = measure(name, "full")
    plain = {v.metric: v.value for v in values if not v.detail}
    assert set(task.shown) <= set(plain)
    assert all(math.isfinite(v.value) and v.n > 0 for v in values)
    assert bench.scorer.usages
    assert set(task.reads) <= {f.name for f in fields(Settings)}


def test_the_same_seed_gives_the_same_numbers(name: str) -> None:
    assert comparable(measure(name, "full")[0]) == comparable(measure(name, "full")[0])


def test_the_progress_bar_is_about_right(name: str) -> None:
    _, _, ticks = measure(name, "window:32")
    promised = load_task(name).cost_tokens(SETTINGS, TRAINED)
    assert promised / 3 <= sum(ticks) <= promised * 3


def test_a_budget_above_the_text_measures_as_the_full_cache(name: str) -> None:
    for (metric, a, n, detail), other in zip(
        comparable(measure(name, "full")[0]), comparable(measure(name, "window:100%")[0]), strict=True
    ):
        assert (metric, n, detail) == (other[0], other[2], other[3])
        assert other[1] == pytest.approx(a, rel=1e-4, abs=1e-6)


def test_a_tiny_window_shows(name: str) -> None:
    if name == "speed":
        full = {v.metric: v.value for v in measure(name, "full")[0]}
        few = {v.metric: v.value for v in measure(name, "window:8")[0]}
        assert few["held_bytes_per_token"] < full["held_bytes_per_token"] / 2
        return
    assert comparable(measure(name, "full")[0]) != comparable(measure(name, "window:8")[0])
