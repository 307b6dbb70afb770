"""What caches cost on the default model: figures that do not hang on the machine. docs/measured.md has more of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from kvarn.core.options import EngineOptions
from kvarn.evals.choices import parse_eval_choices
from kvarn.evals.records import Results, Row
from kvarn.evals.runner import Evaluation
from kvarn.evals.tasks.base import Settings
from kvarn.evals.texts import shipped_text
from kvarn.planner.hardware import usable_cores
from support.fetched import fetched

pytestmark = [pytest.mark.model, pytest.mark.slow]
TOKENS = 1024
STREAMS = ("full", "window:256", "window:256,sinks=4")


@pytest.fixture(autouse=True, scope="module")
def _all_cores() -> Iterator[None]:
    """Tens of thousands of tokens, whose bits do not hang on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    yield
    torch.set_num_threads(before)


def measured(caches: str, task: str, **settings: object) -> Sequence[Row]:
    """Rows of one task over the choices, the full cache first."""
    asked = Settings(text=shipped_text(), **settings)  # pyright: ignore[reportArgumentType]
    files = fetched("smollm2-135m")
    return Evaluation(files, parse_eval_choices(caches), [task], asked, EngineOptions(), Results()).run()


def values(rows: Sequence[Row], metric: str) -> dict[str, float]:
    return {r.cache: r.value for r in rows if r.metric == metric and not r.detail}


def test_int8_costs_less_than_half_a_percent_of_perplexity_at_4096_tokens() -> None:
    rows = measured("int8", "ppl", context_tokens=4096, stride_tokens=512, windows=4)  # one alone is off by 0.7%
    found = values(rows, "perplexity")
    assert abs(found["int8"] / found["full"] - 1) < 0.005
    held = values(rows, "held_bytes_per_token")
    assert held["int8"] < 0.55 * held["full"]


def test_half_of_the_cache_continues_a_text_nearly_as_well() -> None:
    """Within 1.5% of the full cache's perplexity."""
    rows = measured("h2o:50%", "ppl", context_tokens=2048, stride_tokens=256, windows=2)
    found, held = values(rows, "perplexity"), values(rows, "held_bytes_per_token")
    assert found["h2o:50%"] < 1.015 * found["full"]
    assert held["h2o:50%"] < 0.55 * held["full"]


def test_a_quarter_that_saw_the_question_holds_its_answer_better_than_a_window() -> None:
    window = "window:25%,sinks=4"
    rows = measured(f"{window}; snapkv:25%; tova:25%; h2o:25%", "needle", lengths=(TOKENS,), depths=(0.25, 0.5, 0.7))
    seen = values(rows, "seen_logprob")
    assert values(rows, "seen_exact")["full"] == 1.0
    for policy in ("snapkv:25%", "tova:25%", "h2o:25%"):
        assert seen[policy] > seen[window] + 0.5, policy


def test_half_of_the_cache_keeps_a_pass_key_before_it_is_asked_for() -> None:
    """Whether each digit is the very likeliest hangs on the kernels' rounding with h2o, whose weakest digits have a
    probability of about a third: that moves a key by 0.1 nats. The mean over six keys does not hang on it."""
    caches, depths = "h2o:50%; kvzip:50%; window:50%,sinks=4", (0.2, 0.3, 0.4)
    runs = [measured(caches, "needle", lengths=(TOKENS,), depths=depths, seed=seed) for seed in (0, 1)]
    each = [values(rows, "unseen_logprob") for rows in runs]
    logprob = {cache: sum(found[cache] for found in each) / len(each) for cache in each[0]}
    for exact in (values(rows, "unseen_exact") for rows in runs):
        assert exact["kvzip:50%"] == exact["full"] == 1.0
    assert logprob["kvzip:50%"] > logprob["full"] - 0.1
    assert logprob["h2o:50%"] > math.log(0.5), "a digit is likelier than not"
    assert logprob["h2o:50%"] > logprob["window:50%,sinks=4"] + 1.0


def test_a_window_without_sinks_does_damage() -> None:
    """As in StreamingLLM, section 4.1: where the first tokens are dropped, not only what they said is lost."""
    rows = measured("window:256; window:256,sinks=4", "stream", stream_tokens=1024)
    parts = {c: [r.value for r in rows if r.cache == c and r.metric == "perplexity_part"] for c in STREAMS}
    late = {cache: sum(map(math.log, found[6:])) / len(found[6:]) for cache, found in parts.items()}
    assert late["window:256"] > late["full"] + 0.5
    assert late["window:256,sinks=4"] < late["full"] + 0.15
