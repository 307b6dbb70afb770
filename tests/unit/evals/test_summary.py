"""Which choice is recommended, and which ones break the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvarn.core.errors import KvarnError
from kvarn.evals.gate import judge
from kvarn.evals.records import Row
from kvarn.evals.summary import ChoiceSummary, broken, recommend, summaries, unresolved, verdict_lines
from kvarn.evals.table import header, line

PPL = ("ppl", "perplexity")


def choice(
    cache: str,
    ppl: float,
    per_token: float,
    speed: float | None = 10.0,
    error: float | None = 0.0,
    windows: int = 4,
    **values: float,
) -> ChoiceSummary:
    """error: of the perplexity's difference to the full cache's."""
    more = {(k.partition("__")[0], k.partition("__")[2]): v for k, v in values.items()}
    errors = {} if error is None else {PPL: error}
    return ChoiceSummary(cache, {PPL: ppl, **more}, 100, per_token, speed, errors, {PPL: windows})


FULL = choice("full", 20.0, 100.0, kl__top1_agreement=1.0, needle__unseen_exact=0.8)


def test_the_smallest_within_the_budget_is_recommended() -> None:
    found = [FULL, choice("int8", 20.1, 50.0), choice("int4", 20.19, 30.0), choice("int2", 24.0, 20.0)]
    best = recommend(found, 0.01)
    assert best is not None and best.cache == "int4"
    tighter = recommend(found, 0.006)
    assert tighter is not None and tighter.cache == "int8"
    assert recommend(found, 0.001) is FULL


def test_what_is_not_surely_within_the_budget_is_not_recommended_but_named() -> None:
    """Of four windows, one-sided with 95%: the mean and 2.353 times its error."""
    sure = choice("int8", 20.0, 50.0, error=0.08)  # at most 0.94%
    near = choice("int4", 20.0, 30.0, error=0.09)  # at most 1.06%
    more = choice("int4", 20.0, 30.0, error=0.09, windows=12)  # at most 0.81%
    beyond = choice("int2", 20.3, 20.0, error=1.0)
    found = [FULL, sure, near, beyond]
    assert [s.rise_within(FULL, 0.01) for s in found] == [True, True, None, False]
    assert recommend(found, 0.01) is sure
    assert unresolved(found, 0.01) == [near]
    assert verdict_lines(found, 0.01)[1] == "not resolved (windows: 4): int4 (+0.00% ± 0.45%); more --windows tell"
    assert recommend([FULL, sure, more], 0.01) is more
    assert unresolved([FULL, sure, more], 0.01) == []


def test_one_window_resolves_nothing() -> None:
    found = [FULL, choice("int8", 19.9, 50.0, error=None, windows=1)]
    assert recommend(found, 0.01) is FULL
    first, second = verdict_lines(found, 0.01)
    assert "surely" in first
    assert second == "not resolved (windows: 1): int8 (-0.50%); more --windows tell"


def test_larger_choices_that_are_not_resolved_are_not_named() -> None:
    found = [FULL, choice("int4", 20.0, 30.0), choice("int8", 20.0, 50.0, error=0.5)]
    assert unresolved(found, 0.01) == []
    assert len(verdict_lines(found, 0.01)) == 1


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
    (line,) = verdict_lines([FULL, choice("k=int8,v=int4", 20.1, 37.0, 12.0, error=0.02)], 0.01)
    assert line == "at most 1.0% perplexity: k=int8,v=int4, 2.7x smaller (+0.50% ± 0.10% perplexity, 1.20x the speed)"


def speed_row(cache: str, rate: float, fingerprint: str) -> Row:
    return Row(cache, "speed", "decode_tokens_per_s", rate, 7, 2.5, rate, "m", 0, 32, {}, fingerprint, 1, 0.5)


def test_speeds_of_different_hours_are_not_compared() -> None:
    """full and int8 were measured together, then full and int4; int8's is of another hour than the newer full's."""
    rows = [speed_row("full", 10.0, "a"), speed_row("int8", 12.0, "a")]
    rows += [speed_row("full", 5.0, "b"), speed_row("int4", 6.0, "b")]
    rows += [Row(c, "ppl", "perplexity", 20.0, 7, 2.5, 9.0, "m", 0, 9, {}, c, 1, 0.0, (1.0, 1.0)) for c in CACHES]
    full, int8, int4 = summaries(rows)
    assert (full.decode_tokens_per_s, int4.decode_tokens_per_s) == (5.0, 6.0)
    assert int4.speedup(full) == pytest.approx(1.2)
    assert int8.decode_tokens_per_s is None and int8.speedup(full) is None
    at = header([]).index("tokens/s")
    assert [line(s, full, [])[at] for s in (full, int8, int4)] == ["5.0 ± 0.5", "-", "6.0 ± 0.5"]
    assert "speed" not in verdict_lines([full, replace(int8, bytes_per_token=1.0)], 0.01)[0]


CACHES = ("full", "int8", "int4")


def test_a_cell_shows_its_error_beside_the_value() -> None:
    full = choice("full", 20.0, 100.0, kl__top1_agreement=1.0)
    few = choice("int4", 20.1, 30.0, error=0.05, kl__top1_agreement=0.93)
    few.errors["kl", "top1_agreement"] = 0.012
    columns = [PPL, ("kl", "top1_agreement")]
    assert line(few, full, columns)[-2:] == ["20.100 (+0.50% ± 0.25%)", "93.0% ± 1.2%"]
    assert line(full, full, columns)[-2:] == ["20.000", "100.0%"]


def test_the_gate_passes_what_stays_within_the_budget_and_breaks_nothing() -> None:
    found = [
        FULL,
        choice("int8", 20.1, 50.0, error=0.04),
        choice("int4", 21.0, 30.0),
        choice("int2", 20.0, 9.0, kl__top1_agreement=0.5),
    ]
    verdicts = {v.cache: v for v in judge(found, 0.01, 512, "model", ["int8", "int4", "int2"])}
    assert {c: v.passed for c, v in verdicts.items()} == {"int8": True, "int4": False, "int2": False}
    assert verdicts["int4"].rise == pytest.approx(0.05)
    assert "perplexity +0.50% ± 0.20% at 512 tokens" in str(verdicts["int8"])
    with pytest.raises(KvarnError, match="perplexity"):
        judge([ChoiceSummary("full"), ChoiceSummary("int8")], 0.01, 512, "model", ["int8"])


def test_rows_with_a_detail_are_left_out_of_the_summary() -> None:
    row = Row("full", "needle", "seen_logprob", -1.0, 7, 2.5, 3.0, "m", 0, 4)
    cell = Row("full", "needle", "seen_logprob", -9.0, 9, 2.5, 3.0, "m", 0, 1, {"length": 64.0, "depth": 0.5})
    (found,) = summaries([row, cell])
    assert found.values == {("needle", "seen_logprob"): -1.0}
    assert (found.peak_bytes, found.bytes_per_token) == (9, 2.5)
