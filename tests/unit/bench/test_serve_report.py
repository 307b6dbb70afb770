"""Numbers of a run that was written down by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvarn.bench.serve_client import Record, Target
from kvarn.bench.serve_report import Goal, plot, ratios, summarise, table
from kvarn.bench.serve_run import Run

TARGET = Target("ours", "http://x", "m")


def record(ttft_s: float, tpot_s: float, tokens: int = 11, error: str | None = None) -> Record:
    pieces = [] if error else [ttft_s + i * tpot_s for i in range(tokens)]
    end = pieces[-1] if pieces else 0.5
    return Record(0, 0, 0.0, pieces, end, "", 100, 0 if error else tokens, 40, error)


RUN = Run(
    TARGET, "cold", (record(0.1, 0.01), record(0.2, 0.02), record(0.3, 0.03), record(0, 0, error="HTTP 500")), 2.0
)


def test_rates_and_percentiles() -> None:
    got = summarise(RUN, Goal())
    assert (got.requests, got.failed, got.errors) == (4, 1, {"HTTP 500": 1})
    assert got.requests_per_s == 1.5
    assert got.output_tokens_per_s == 16.5
    assert (got.prompt_tokens, got.cached_tokens) == (300, 120)
    assert got.ttft_s["p50"] == pytest.approx(0.2)
    assert got.ttft_s["p99"] == pytest.approx(0.298)
    assert got.tpot_s["p50"] == pytest.approx(0.02)
    assert got.itl_s["p50"] == pytest.approx(0.02)
    assert got.e2e_s["p50"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("goal", "per_s"), [(Goal(), 1.5), (Goal(ttft_s=0.25), 1.0), (Goal(tpot_s=0.015), 0.5), (Goal(0.15, 0.005), 0.0)]
)
def test_goodput(goal: Goal, per_s: float) -> None:
    assert summarise(RUN, goal).goodput_per_s == per_s


def test_a_run_of_errors_only() -> None:
    got = summarise(Run(TARGET, "", (record(0, 0, error="ConnectError"),), 1.0), Goal())
    assert (got.requests_per_s, got.ttft_s) == (0.0, {})
    Console(quiet=True).print(table([got]))


def test_one_token_has_no_time_per_token() -> None:
    assert record(0.1, 0.0, tokens=1).tpot_s is None


def test_ratios_are_to_the_best_of_the_others_in_the_same_run() -> None:
    def run(name: str, warmth: str, ttft_s: float, duration_s: float) -> Run:
        return Run(replace(TARGET, name=name), warmth, (record(ttft_s, 0.01),), duration_s)

    runs = [run("kvarn", "cold", 0.2, 1.0), run("kvarn", "warm", 0.1, 1.0)]
    runs += [run("a", "cold", 0.4, 4.0), run("b", "cold", 0.8, 2.0), run("b", "warm", 0.1, 1.0)]
    found = ratios([summarise(r, Goal()) for r in runs], "kvarn")
    assert [(f["run"], f["best_peer_server"], f["ratio"]) for f in found] == [
        ("cold", "b", 2.0), ("cold", "a", pytest.approx(0.5)), ("warm", "b", 1.0), ("warm", "b", 1.0)
    ]  # fmt: skip
    assert ratios([summarise(runs[0], Goal())], "kvarn") == []


def test_plot_is_a_picture(tmp_path: Path) -> None:
    plot([RUN], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
