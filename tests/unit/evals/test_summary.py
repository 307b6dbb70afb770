"""Which choice is recommended, and which ones break the model."""

from __future__ import annotations

import pytest

from kvarn.core.errors import KvarnError
from kvarn.evals.gate import judge
from kvarn.evals.records import Row
from kvarn.evals.summary import ChoiceSummary, broken, recommend, summaries, verdict_lines


def choice(cache: str, ppl: float, per_token: float, speed: float = 10.0, **values: float) -> ChoiceSummary:
    more = {(k.partition("__")[0], k.partition("__")[2]): v for k, v in values.items()}
    return ChoiceSummary(cache, {("ppl", "perplexity"): ppl, **more}, 100, per_token, speed)


FULL = choice("full", 20.0, 100.0, kl__top1_agreement=1.0, needle__unseen_exact=0.8)


def test_the_smallest_within_the_budget_is_recommended() -> None:
    found = [FULL, choice("int8", 20.1, 50.0), choice("int4", 20.19, 30.0), choice("int2", 24.0, 20.0)]
    best = recommend(found, 0.01)
    assert best is not None and best.cache == "int4"
    tighter = recommend(found, 0.006)
    assert tighter is not None and tighter.cache == "int8"
    assert recommend(found, 0.001) is FULL


def test_of_two_alike_the_faster_one() -> None:
    found = [FULL, choice("slow", 20.0, 50.0, 5.0), choice("fast", 20.0, 50.0, 9.0)]
    best = recommend(found, 0.01)
    assert best is not None and best.cache == "fast"


def test_a_choice_that_breaks_the_model_is_not_recommended_whatever_its_perplexity() -> None:
    lost = choice("h2o:5%", 20.0, 5.0, needle__unseen_exact=0.1)
    other = choice("int2", 19.0, 10.0, kl__top1_agreement=0.6)
    assert recommend([FULL, lost, other], 0.01) is FULL
    assert broken(lost, FULL) == ["needle unseen exact 10% instead of 80%"]
    assert "60%" in broken(other, FULL)[0]
    assert broken(choice("int2", 26.0, 10.0), FULL) == ["perplexity +30.00%"]
    streamed = ChoiceSummary("full", {("stream", "perplexity_end"): 20.0})
    diverged = ChoiceSummary("window:64", {("stream", "perplexity_end"): 4000.0})
    assert broken(diverged, streamed) == ["perplexity end of stream 200 times"]
    lines = verdict_lines([FULL, lost, other], 0.01)
    assert lines[0].startswith("at most 1.0% perplexity: full")
    assert "small models" in lines[-1]


def test_the_line_of_a_recommendation_gives_its_figures() -> None:
    (line,) = verdict_lines([FULL, choice("k=int8,v=int4", 20.1, 37.0, 12.0)], 0.01)
    assert line == "at most 1.0% perplexity: k=int8,v=int4, 2.7x smaller (+0.50% perplexity, 1.20x the speed)"


def test_the_gate_passes_what_stays_within_the_budget_and_breaks_nothing() -> None:
    found = [
        FULL,
        choice("int8", 20.1, 50.0),
        choice("int4", 21.0, 30.0),
        choice("int2", 20.0, 9.0, kl__top1_agreement=0.5),
    ]
    verdicts = {v.cache: v for v in judge(found, 0.01, 512, "model", ["int8", "int4", "int2"])}
    assert {c: v.passed for c, v in verdicts.items()} == {"int8": True, "int4": False, "int2": False}
    assert verdicts["int4"].rise == pytest.approx(0.05)
    with pytest.raises(KvarnError, match="perplexity"):
        judge([ChoiceSummary("full"), ChoiceSummary("int8")], 0.01, 512, "model", ["int8"])


def test_rows_with_a_detail_are_left_out_of_the_summary() -> None:
    row = Row("full", "needle", "seen_logprob", -1.0, 7, 2.5, 3.0, "m", 0, 4)
    cell = Row("full", "needle", "seen_logprob", -9.0, 9, 2.5, 3.0, "m", 0, 1, {"length": 64.0, "depth": 0.5})
    (found,) = summaries([row, cell])
    assert found.values == {("needle", "seen_logprob"): -1.0}
    assert (found.peak_bytes, found.bytes_per_token) == (9, 2.5)
