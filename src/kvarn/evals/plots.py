"""Pictures of an evaluation: memory against quality, speed against quality, needles by depth and length. matplotlib is
optional."""

from __future__ import annotations

import io
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from kvarn.core.errors import KvarnError
from kvarn.evals.records import Row
from kvarn.evals.summary import RATE, ChoiceSummary, Key, shown_columns, summaries

MARKERS = "osD^vP*X<>hp"
FORMS = ("seen", "unseen")
LEAST_SPAN = 0.05  # of the value shown: differences below it should look small
MOST_RISE = 0.05  # of perplexity: what is worse stands at the upper edge with its number, so that the others lie apart
BARS = "bars: standard error, of the difference to the full cache over the same text, and of the speed"
MOST_CELLS = 60  # of a map: more of them would be too small for a number


def _matplotlib() -> tuple[ModuleType, ModuleType]:
    try:
        from matplotlib import figure, ticker  # noqa: PLC0415  optional, and slow to load
    except ImportError as error:
        raise KvarnError(
            "pictures need matplotlib, which is not installed", fixes=("pip install matplotlib",)
        ) from error
    return figure, ticker


def pictures(rows: Sequence[Row], best: str | None, most_rise: float | None = None) -> dict[str, Any]:
    """Figures by name: memory, speed, and needle where it ran. best: the recommended choice, which is marked.
    most_rise: of perplexity, as a share, where a line is drawn."""
    found, quality = summaries(rows), quality_of(rows)
    axes = {
        "memory": ("bytes_per_token", "KV cache held (bytes a token of text); left is better"),
        "speed": ("decode_tokens_per_s", "decode speed (tokens/s); right is better"),
    }
    drawn = {name: _scatter(found, quality, best, most_rise, *axis) for name, axis in axes.items()}
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


def _scatter(
    found: Sequence[ChoiceSummary],
    quality: Key | None,
    best: str | None,
    most_rise: float | None,
    field: str,
    label: str,
) -> Any:
    figure, ticker = _matplotlib()
    fig = figure.Figure(figsize=(9, 4.8), layout="constrained")
    axes = fig.subplots()
    key = quality or ("", "")
    drawn = [c for c in found if key in c.values and getattr(c, field) is not None]
    values = [choice.values[key] for choice in drawn]
    ceiling = values[0] * (1 + MOST_RISE) if values and key[1].startswith("perplexity") else float("inf")
    for index, choice in enumerate(drawn):
        x, y = getattr(choice, field), min(choice.values[key], ceiling)
        x_error = choice.errors.get(RATE) if field == RATE[1] else None
        y_error = choice.errors.get(key) if choice is not found[0] and choice.values[key] <= ceiling else None
        look = {"color": f"C{index % 10}", "fmt": MARKERS[index % len(MARKERS)]}
        axes.errorbar(x, y, y_error, x_error, **look, label=choice.cache, markersize=8, capsize=3, elinewidth=1)
        if choice.values[key] > ceiling:
            text = f"{choice.values[key]:,.4g} \u2191"
            axes.annotate(text, (x, y), (8, 0), textcoords="offset points", va="center", fontsize="small")
        if choice.cache == best:
            axes.plot(x, y, "o", markersize=16, fillstyle="none", color="black", label="recommended", zorder=3)
    if values:
        _quality_axis(axes, key, [min(v, ceiling) for v in values], most_rise)
    axes.set(xlabel=label, xlim=(0, None))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.grid(alpha=0.3)
    fig.legend(loc="outside right upper", fontsize="small")
    if any(choice.errors.get(key) for choice in drawn[1:]):
        fig.supxlabel(BARS, fontsize="small", color="gray")
    return fig


def _quality_axis(axes: Any, key: Key, values: Sequence[float], most_rise: float | None) -> None:
    """Label and span of the axis that shows quality; the first value is the full cache's."""
    task, metric = key
    label = f"{task}: {metric.replace('_', ' ')}"
    if not metric.startswith("perplexity"):
        axes.set_ylabel(label)
        return
    if most_rise is not None:
        axes.axhline(values[0] * (1 + most_rise), linestyle="--", linewidth=1, color="gray", label=f"+{most_rise:.1%}")
    low, high = min(values), max(values)
    axes.set_ylabel(f"{label}; lower is better")
    around = max(1.1 * (high - low), LEAST_SPAN * low) / 2
    axes.set_ylim((low + high) / 2 - around, (low + high) / 2 + around)


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
            if len(lengths) * len(depths) <= MOST_CELLS:
                _write_numbers(axes, table, low)
            axes.set_title(f"{cache}, question {form}", fontsize="small")
            axes.set_xticks(range(len(lengths)), [f"{n:.0f}" for n in lengths], fontsize="small")
            axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize="small")
    fig.supxlabel("length (tokens)", fontsize="small")
    fig.supylabel("depth of the key", fontsize="small")
    fig.colorbar(image, ax=grid, label="log-probability a token (0: certain)")
    return fig


def _write_numbers(axes: Any, table: Sequence[Sequence[float]], low: float) -> None:
    """Each cell's value, dark on light and light on dark."""
    for down, line in enumerate(table):
        for across, value in enumerate(line):
            color = "black" if value > low / 2 else "white"
            axes.text(across, down, f"{value:.1f}", ha="center", va="center", fontsize="x-small", color=color)
