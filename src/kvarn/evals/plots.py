"""Pictures of an evaluation: memory against quality, speed against quality, needles by depth and length. matplotlib is
optional."""

from __future__ import annotations

import io
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from kvarn.core.errors import KvarnError
from kvarn.evals.records import Row
from kvarn.evals.summary import ChoiceSummary, Key, shown_columns, summaries

MARKERS = "osD^vP*X<>hp"
FORMS = ("seen", "unseen")


def _matplotlib() -> tuple[ModuleType, ModuleType]:
    try:
        from matplotlib import figure, ticker  # noqa: PLC0415  optional, and slow to load
    except ImportError as error:
        raise KvarnError(
            "pictures need matplotlib, which is not installed", fixes=("pip install matplotlib",)
        ) from error
    return figure, ticker


def pictures(rows: Sequence[Row], best: str | None) -> dict[str, Any]:
    """Figures by name: memory, speed, and needle where it ran. best: the recommended choice, which is marked."""
    found, quality = summaries(rows), quality_of(rows)
    drawn = {
        "memory": _scatter(found, quality, best, "bytes_per_token", "KV cache held (bytes a token of text)"),
        "speed": _scatter(found, quality, best, "decode_tokens_per_s", "decode speed (tokens/s)"),
    }
    if cells := [r for r in rows if r.task == "needle" and r.detail and r.metric.endswith("_logprob")]:
        drawn["needle"] = _heat_maps(cells)
    return drawn


def quality_of(rows: Sequence[Row]) -> Key | None:
    """What the pictures show as quality: perplexity, or the first metric of the first task."""
    columns = shown_columns(rows)
    return ("ppl", "perplexity") if ("ppl", "perplexity") in columns else next(iter(columns), None)


def as_svg(figure: Any) -> str:
    """The figure as an <svg> element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _scatter(found: Sequence[ChoiceSummary], quality: Key | None, best: str | None, field: str, label: str) -> Any:
    figure, ticker = _matplotlib()
    fig = figure.Figure(figsize=(8.5, 4.5), layout="constrained")
    axes = fig.subplots()
    key, ring = quality or ("", ""), None
    for index, choice in enumerate(found):
        if (y := choice.values.get(key)) is None:
            continue
        x, marker = getattr(choice, field), MARKERS[index % len(MARKERS)]
        axes.plot(x, y, marker, color=f"C{index % 10}", markersize=9, label=choice.cache)
        if choice.cache == best:
            ring = (x, y)
    if ring is not None:
        axes.plot(*ring, "o", markersize=16, fillstyle="none", color="black", label="recommended")
    task, metric = key
    axes.set(xlabel=label, ylabel=f"{task}: {metric.replace('_', ' ')}")
    values = [choice.values[key] for choice in found if key in choice.values]
    if values and metric.startswith("perplexity") and max(values) > 3 * min(values):
        axes.set_yscale("log")
        axes.set_ylabel(f"{task}: {metric.replace('_', ' ')} (log)")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.grid(alpha=0.3)
    fig.legend(loc="outside right upper", fontsize="small")
    return fig


def _heat_maps(cells: Sequence[Row]) -> Any:
    """One map a choice and form: mean log-probability of the key's tokens, 0 is certain."""
    figure, _ = _matplotlib()
    caches = list(dict.fromkeys(r.cache for r in cells))
    lengths = sorted({r.detail["length"] for r in cells})
    depths = sorted({r.detail["depth"] for r in cells})
    fig = figure.Figure(figsize=(8, 1.1 + 1.5 * len(caches)), layout="constrained")
    grid = fig.subplots(len(caches), len(FORMS), squeeze=False)
    low = min(-3.0, min(r.value for r in cells))
    image = None
    for down, cache in enumerate(caches):
        for across, form in enumerate(FORMS):
            values = {
                (r.detail["depth"], r.detail["length"]): r.value
                for r in cells
                if r.cache == cache and r.metric == f"{form}_logprob"
            }
            axes = grid[down][across]
            table = [[values.get((d, n), float("nan")) for n in lengths] for d in depths]
            image = axes.imshow(table, vmin=low, vmax=0, aspect="auto", cmap="viridis")
            axes.set_title(f"{cache}, question {form}", fontsize="small")
            axes.set_xticks(range(len(lengths)), [f"{n:.0f}" for n in lengths], fontsize="small")
            axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize="small")
    fig.supxlabel("length (tokens)", fontsize="small")
    fig.supylabel("depth of the key", fontsize="small")
    fig.colorbar(image, ax=grid, label="log-probability a token (0: certain)")
    return fig
