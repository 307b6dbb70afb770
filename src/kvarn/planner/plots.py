"""Plots of a plan: memory against context and batch, tokens/s against batch. svg, png or html. matplotlib is
optional."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from types import ModuleType

from kvarn.core.errors import InvalidRequest, KvarnError
from kvarn.planner.case import Case
from kvarn.planner.report import render
from kvarn.planner.result import Plan
from kvarn.planner.sizes import GIB
from kvarn.planner.times import BATCHES

SUFFIXES = (".svg", ".png", ".html")
CONTEXTS = tuple(2**i for i in range(10, 21))
PLOT_BATCHES = (1, 4, 16, 64)


def _figures() -> ModuleType:
    try:
        from matplotlib import figure  # noqa: PLC0415  optional, and slow to load
    except ImportError as error:
        raise KvarnError("plots need matplotlib, which is not installed", fixes=("pip install matplotlib",)) from error
    return figure


def memory_curves(case: Case) -> dict[int, list[tuple[int, int]]]:
    """Cache bytes on the fullest rank by batch: [(context, bytes)]."""
    most = case.geometry.max_context or CONTEXTS[-1]
    contexts = [c for c in CONTEXTS if c <= max(most, case.settings.context_tokens)]
    return {
        batch: [(c, max(cache.held(batch, c).total for cache in case.stages)) for c in contexts]
        for batch in sorted({*PLOT_BATCHES, case.settings.sequences})
    }


def draw(case: Case, plan: Plan):
    """A matplotlib figure with both plots."""
    fig = _figures().Figure(figsize=(11, 4.5), layout="constrained")
    left, right = fig.subplots(1, 2)
    curves = memory_curves(case)
    for batch, points in curves.items():
        left.plot(
            [c for c, _ in points],
            [b / GIB for _, b in points],
            marker=".",
            label=f"{batch} sequence{'s' * (batch > 1)}",
        )
    if plan.cache_bytes:
        left.axhline(plan.cache_bytes / GIB, color="black", linestyle="--", label="memory for the cache")
    left.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="KV cache of a device (GiB)")
    _only_ticks(left, sorted({c for points in curves.values() for c, _ in points}))
    left.set_title(f"Memory: {plan.model}")
    left.legend(fontsize="small")
    _speed(right, plan)
    return fig


def _speed(axes, plan: Plan) -> None:
    points = plan.time.batches
    axes.set_title(f"Decode at {plan.context:,} tokens, {plan.time.basis}")
    if not points:
        axes.set_axis_off()  # ticks of nothing would look like a measurement
        axes.text(0.5, 0.5, "the device's speed is not known: give --hardware", ha="center", transform=axes.transAxes)
        return
    axes.set(xlabel="batch (sequences)", ylabel="tokens/s, all sequences", xscale="log")
    axes.plot([p.batch for p in points], [p.tokens_per_s for p in points], marker="o", color="tab:blue")
    if over := [p for p in points if p.fits is False]:
        style = {"marker": "x", "color": "tab:red", "markersize": 9, "linestyle": "", "label": "does not fit"}
        axes.plot([p.batch for p in over], [p.tokens_per_s for p in over], **style)
        axes.legend(fontsize="small")
    _only_ticks(axes, [b for b in BATCHES if b <= points[-1].batch])
    axes.set_ylim(bottom=0)


def _only_ticks(axes, values: list[int]) -> None:
    """Whole numbers on a logarithmic axis, at no other places than these."""
    axes.set_xticks(values, [f"{v:,}" for v in values])
    axes.set_xticks([], minor=True)


def save(case: Case, plan: Plan, path: Path) -> None:
    """Write the plots to `path`. Raises InvalidRequest for another suffix, KvarnError without matplotlib or where the
    file cannot be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidRequest(f"plot file {str(path)!r}", fixes=(f"end it in {', '.join(SUFFIXES)}",))
    fig = draw(case, plan)
    try:
        if path.suffix.lower() == ".html":
            buffer = io.StringIO()
            fig.savefig(buffer, format="svg")
            path.write_text(_page(buffer.getvalue(), plan), encoding="utf-8")
        else:
            fig.savefig(path)
    except OSError as error:
        raise KvarnError(f"cannot write {path}: {error.strerror or error}") from error


def _page(svg: str, plan: Plan) -> str:
    """A page that stands alone: the plots and the report."""
    drawing = svg[svg.index("<svg") :]
    title = escape(f"{plan.model} on {plan.engine}")
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title></head>\n<body>\n'
        f"<h1>{title}</h1>\n{drawing}\n<pre>{escape(render(plan))}</pre>\n</body>\n</html>\n"
    )
