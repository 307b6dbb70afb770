"""Pictures of what was measured. matplotlib is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvarn.bench.sweep import Figure, Growth, Use
from kvarn.core.errors import KvarnError


def _axes(width: float) -> tuple[Any, Any, Any]:
    try:
        from matplotlib.figure import Figure as Canvas  # noqa: PLC0415  optional, and slow to load
    except ImportError as error:
        raise KvarnError("plots need matplotlib, which is not installed", fixes=("pip install matplotlib",)) from error
    canvas = Canvas(figsize=(width, 4.5), layout="constrained")
    left, right = canvas.subplots(1, 2)
    return canvas, left, right


def plot_sweep(figures: Sequence[Figure], path: Path) -> None:
    """Tokens a second against depth, and against the batch."""
    canvas, left, right = _axes(11)
    for engine in dict.fromkeys(f.engine for f in figures):
        deep = [(f.case.prompt_tokens, f.value) for f in figures if f.engine == engine and "decode_at" in f.case.name]
        wide = [(f.case.streams, f.value) for f in figures if f.engine == engine and "batch_" in f.case.name]
        for axes, points in ((left, deep), (right, wide)):
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=engine)
    left.set(title="Decoding, by context", xlabel="context (tokens)", ylabel="tokens/s, one stream", ylim=(0, None))
    right.set(title="Decoding, by batch", xlabel="streams", ylabel="tokens/s, all streams", ylim=(0, None))
    left.legend(fontsize="small")
    canvas.savefig(path)


def plot_cache(grown: Growth, uses: Sequence[Use], path: Path) -> None:
    """Time a token as the text grows, and utilisation over the steps of a mix."""
    canvas, left, right = _axes(11)
    for label, times in (("with cache", grown.with_cache_s), ("without", grown.without_s)):
        left.plot(grown.tokens, [t * 1000 for t in times], marker=".", label=label)
    left.set(title="One token more", xlabel="text so far (tokens)", ylabel="ms a token", yscale="log")
    left.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    left.yaxis.set_major_formatter("{x:,.10g}")  # 50, not 5 x 10^1
    left.yaxis.set_minor_formatter("")
    left.legend(fontsize="small")
    for use in uses:
        right.plot([100 * u for u in use.utilisation], label=f"{use.cache}: mean {use.mean_utilisation:.0%}")
    right.set(title="A mix of lengths", xlabel="step", ylabel="tokens stored / tokens reserved (%)", ylim=(0, 100))
    right.legend(fontsize="small")
    canvas.savefig(path)
