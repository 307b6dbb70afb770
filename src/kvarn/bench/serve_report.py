"""Numbers of a run: rates, percentiles, goodput, errors; as a table, as JSON, as a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from kvarn.bench.serve_client import Record
from kvarn.bench.serve_run import Run
from kvarn.core.errors import InvalidRequest

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Goal:
    """What an answer must keep to count as good; None: not asked."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, record: Record) -> bool:
        if record.error is not None:
            return False
        slow = self.tpot_s is not None and record.tpot_s is not None and record.tpot_s > self.tpot_s
        return not slow and (self.ttft_s is None or record.ttft_s <= self.ttft_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. ttft_s, tpot_s, itl_s (time between two pieces), e2e_s: percentile -> seconds. goodput_per_s: answers a
    second that met the goal. Tokens are as the server counted them."""

    target: str
    run: str
    requests: int
    failed: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    goodput_per_s: float
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    itl_s: dict[str, float]
    e2e_s: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(run: Run, goal: Goal) -> Summary:
    good = [r for r in run.records if r.error is None]
    gaps = [b - a for r in good for a, b in zip(r.pieces_s, r.pieces_s[1:], strict=False)]
    return Summary(
        target=run.target.name,
        run=run.name,
        requests=len(run.records),
        failed=len(run.records) - len(good),
        errors=dict(Counter(r.error for r in run.records if r.error is not None)),
        duration_s=run.duration_s,
        requests_per_s=len(good) / run.duration_s,
        output_tokens_per_s=sum(r.output_tokens for r in good) / run.duration_s,
        prompt_tokens=sum(r.prompt_tokens for r in good),
        cached_tokens=sum(r.cached_tokens for r in good),
        output_tokens=sum(r.output_tokens for r in good),
        goodput_per_s=sum(goal.met(r) for r in run.records) / run.duration_s,
        ttft_s=_percentiles([r.ttft_s for r in good]),
        tpot_s=_percentiles([t for r in good if (t := r.tpot_s) is not None]),
        itl_s=_percentiles(gaps),
        e2e_s=_percentiles([r.end_s for r in good]),
    )


def ratios(summaries: Sequence[Summary], own: str) -> list[dict[str, Any]]:
    """Of each run, the server called `own` against the best of the others: requests a second (more is better) and the
    95th percentile of the time to the first token (less is better)."""
    lines = []
    for mine in (s for s in summaries if s.target == own and s.ttft_s):
        others = [s for s in summaries if s.run == mine.run and s.target != own and s.ttft_s]
        if not others:
            continue
        most = max(others, key=lambda s: s.requests_per_s)
        soonest = min(others, key=lambda s: s.ttft_s["p95"])
        lines += [
            _ratio(mine.run, "requests/s", mine.requests_per_s, most.requests_per_s, most.target),
            _ratio(mine.run, "p95 time to first token, s", mine.ttft_s["p95"], soonest.ttft_s["p95"], soonest.target),
        ]
    return lines


def _ratio(run: str, what: str, own: float, best: float, name: str) -> dict[str, Any]:
    return {"run": run, "figure": what, "kvarn": own, "best_peer": best, "best_peer_server": name, "ratio": own / best}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"p{p}": round(float(v), 6) for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


def table(summaries: Sequence[Summary]) -> Table:
    """A column a run, so that it fits a narrow terminal."""
    made = Table(title="milliseconds at p50 / p95 / p99; tokens as each server counted them")
    made.add_column("")
    for s in summaries:
        made.add_column(f"{s.target} {s.run}".strip(), justify="right")
    cells = [_cells(s) for s in summaries]
    for name in cells[0]:
        made.add_row(name, *(c[name] for c in cells))
    return made


def _cells(s: Summary) -> dict[str, str]:
    cached = f"{100 * s.cached_tokens / s.prompt_tokens:.0f}%" if s.prompt_tokens else "-"
    failed = f"{s.failed} ({', '.join(f'{n} {e}' for e, n in s.errors.items())})" if s.failed else "0"
    return {
        "requests/s": f"{s.requests_per_s:.2f}",
        "answered tokens/s": f"{s.output_tokens_per_s:.1f}",
        "goodput, requests/s": f"{s.goodput_per_s:.2f}",
        "first token": _milliseconds(s.ttft_s),
        "per token after it": _milliseconds(s.tpot_s),
        "between two pieces": _milliseconds(s.itl_s),
        "whole answer": _milliseconds(s.e2e_s),
        "prompt tokens": f"{s.prompt_tokens:,}",
        "of these cached": cached,
        "requests": f"{s.requests:,}",
        "failed": failed,
    }


def _milliseconds(values: dict[str, float]) -> str:
    return " / ".join(f"{1000 * v:.0f}" for v in values.values()) or "-"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Share of answers whose first token, and whose mean token, came within a time. Raises InvalidRequest."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (optional)
    except ImportError as error:
        raise InvalidRequest("a plot needs matplotlib", fixes=("pip install 'kvarn[serve]'",)) from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, title, value in (
        (axes[0], "time to first token", lambda r: r.ttft_s),
        (axes[1], "time per token after it", lambda r: r.tpot_s),
    ):
        for run in runs:
            times = sorted(1000 * t for r in run.records if r.error is None and (t := value(r)) is not None)
            shares = [100 * (i + 1) / len(times) for i in range(len(times))]
            axis.step(times, shares, where="post", label=f"{run.target.name} {run.name}".strip())
        axis.set(title=title, xlabel="milliseconds", ylabel="answers, %", xscale="log", ylim=(0, 100))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=140)
