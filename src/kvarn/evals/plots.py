"""Pictures of an evaluation: memory against quality, speed against quality, needles by depth and length. matplotlib is
optional."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from kvarn.core.errors import KvarnError
from kvarn.evals.records import Row
from kvarn.evals.summary import RATE, ChoiceSummary, Key, shown_columns, summaries

MARKERS = "osD^vP*X<>hp"
FORMS = ("seen", "unseen")
LEAST_SPAN = 0.03  # of the value shown: differences below it should look small
LEAST_PART = 0.7  # of the highest speed: where its axis begins at the latest
SAME, BESIDE_POINTS = 0.015, 10  # of the widest x: closer ones stand side by side, so many points of the page apart
EDGE = 0.96  # of the height
MOST_RISE = 0.05  # of perplexity: what is worse stands at the upper edge with its number, so that the others lie apart
BARS = {
    "bytes_per_token": "bars: standard error of the difference to the full cache; caches of a size stand side by side",
    "decode_tokens_per_s": "bars: standard error, of the difference to the full cache and of the speed",
}
MOST_CELLS = 60  # of a map: more of them would be too small for a number


def _matplotlib() -> tuple[ModuleType, ModuleType, ModuleType]:
    try:
        from matplotlib import figure, ticker, transforms  # noqa: PLC0415  optional, and slow to load
    except ImportError as error:
        raise KvarnError(
            "pictures need matplotlib, which is not installed", fixes=("pip install matplotlib",)
        ) from error
    return figure, ticker, transforms


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


@dataclass(frozen=True)
class _Point:
    """One choice in a picture. off: so much worse that it stands at the upper edge, with its number. beside: how many
    points of the page to the right of its x, where several would lie upon each other."""

    choice: ChoiceSummary
    x: float
    y: float
    x_error: float | None
    y_error: float | None
    off: bool
    beside: float = 0.0


def _points(found: Sequence[ChoiceSummary], key: Key, field: str) -> list[_Point]:
    drawn = [c for c in found if key in c.values and getattr(c, field) is not None]
    limit = drawn[0].values[key] * (1 + MOST_RISE) if drawn and key[1].startswith("perplexity") else float("inf")
    points: list[_Point] = []
    for choice in drawn:
        y, off = choice.values[key], choice.values[key] > limit
        x_error = choice.errors.get(RATE) if field == RATE[1] else None
        y_error = None if off or choice is found[0] else choice.errors.get(key)
        points.append(_Point(choice, getattr(choice, field), y, x_error, y_error, off))
    return points


def _side_by_side(points: Sequence[_Point]) -> list[_Point]:
    """Points of nearly the same x, next to each other."""
    near = SAME * max((p.x for p in points), default=0.0)
    found: list[_Point] = []
    for point in points:
        alike = [p for p in points if abs(p.x - point.x) <= near and not p.off]
        place = alike.index(point) - (len(alike) - 1) / 2 if point in alike else 0.0
        found.append(replace(point, beside=place * BESIDE_POINTS))
    return found


def _scatter(
    found: Sequence[ChoiceSummary],
    quality: Key | None,
    best: str | None,
    most_rise: float | None,
    field: str,
    label: str,
) -> Any:
    figure, ticker, transforms = _matplotlib()
    fig = figure.Figure(figsize=(9, 4.8), layout="constrained")
    axes = fig.subplots()
    key = quality or ("", "")
    points = _points(found, key, field)
    for index, point in enumerate(points if field == RATE[1] else _side_by_side(points)):
        base = axes.get_xaxis_transform() if point.off else axes.transData
        moved = base + transforms.ScaledTranslation(point.beside / 72, 0, fig.dpi_scale_trans)
        place = point.x, EDGE if point.off else point.y
        look = {"color": f"C{index % 10}", "fmt": MARKERS[index % len(MARKERS)], "transform": moved}
        bars = axes.errorbar(*place, point.y_error, point.x_error, **look, markersize=8, capsize=3, elinewidth=1)
        bars.set_label(point.choice.cache)
        if point.off:
            text = f"{point.y:,.4g} \u2191"
            axes.annotate(text, place, (12, 0), base, textcoords="offset points", va="center", fontsize="small")
        if point.choice.cache == best:
            ring = {"markersize": 16, "fillstyle": "none", "color": "black", "transform": moved, "zorder": 3}
            axes.plot(*place, "o", **ring, label="recommended")
    if points:
        _quality_axis(axes, key, points, most_rise)
        low, high = (end(p.x + side * (p.x_error or 0.0) for p in points) for end, side in ((min, -1), (max, 1)))
        axes.set_xlim(min(0.95 * low, LEAST_PART * high) if field == RATE[1] else 0.0, 1.05 * high)
        fig.legend(loc="outside right upper", fontsize="small")
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.grid(alpha=0.3)
    if any(p.y_error for p in points):
        fig.supxlabel(BARS[field], fontsize="small", color="gray")
    return fig


def _quality_axis(axes: Any, key: Key, points: Sequence[_Point], most_rise: float | None) -> None:
    """Label and span of the axis that shows quality; the first point is the full cache's."""
    task, metric = key
    label = f"{task}: {metric.replace('_', ' ')}"
    if not metric.startswith("perplexity"):
        axes.set_ylabel(label)
        return
    ends = [p.y + side * (p.y_error or 0.0) for p in points if not p.off for side in (-1, 1)]
    if most_rise is not None:
        allowed = points[0].y * (1 + most_rise)
        axes.axhline(allowed, linestyle="--", linewidth=1, color="gray", label=f"+{most_rise:.1%}")
        ends += [allowed] * (most_rise <= MOST_RISE)
    low, high = min(ends), max(ends)
    axes.set_ylabel(f"{label}; lower is better")
    around = max((1.3 if any(p.off for p in points) else 1.1) * (high - low), LEAST_SPAN * low) / 2
    axes.set_ylim((low + high) / 2 - around, (low + high) / 2 + around)


def _heat_maps(cells: Sequence[Row]) -> Any:
    """One map a choice and form: mean log-probability of the key's tokens, 0 is certain."""
    figure, *_ = _matplotlib()
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
