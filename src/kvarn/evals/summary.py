"""From rows to what a reader wants: a line a choice, which one to take, and which ones break the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvarn.evals.records import Row
from kvarn.evals.tasks.base import load_task

PERPLEXITY, KL, AGREEMENT = ("ppl", "perplexity"), ("kl", "kl"), ("kl", "top1_agreement")
BROKEN_RISE = 0.25  # of perplexity: about what half the parameters cost
BROKEN_AGREEMENT = 0.75  # of the likeliest tokens: one in four is another
BROKEN_SHARE = 0.5  # of the questions that the full cache answers
HELD = ("speed", "held_bytes_per_token")

Key = tuple[str, str]  # task, metric


@dataclass(frozen=True)
class ChoiceSummary:
    """What one cache choice costs and keeps. values: by (task, metric), without details. peak_bytes: over all tasks."""

    cache: str
    values: dict[Key, float] = field(default_factory=dict)
    peak_bytes: int = 0
    bytes_per_token: float = 0.0
    decode_tokens_per_s: float = 0.0

    def rise(self, full: ChoiceSummary) -> float | None:
        """How much worse its perplexity is than the full cache's, as a share; None where it was not measured."""
        mine, theirs = self.values.get(PERPLEXITY), full.values.get(PERPLEXITY)
        return None if mine is None or theirs is None else mine / theirs - 1

    def smaller(self, full: ChoiceSummary) -> float:
        """How many times fewer bytes it holds for a token of text."""
        return full.bytes_per_token / self.bytes_per_token if self.bytes_per_token else 1.0


def summaries(rows: Iterable[Row]) -> list[ChoiceSummary]:
    """One a choice, in order of appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.cache, []).append(row)
    return [_summary(cache, mine) for cache, mine in found.items()]


def _summary(cache: str, rows: Sequence[Row]) -> ChoiceSummary:
    values = {(r.task, r.metric): r.value for r in rows if not r.detail}
    return ChoiceSummary(
        cache=cache,
        values=values,
        peak_bytes=max(r.physical_bytes_peak for r in rows),
        bytes_per_token=values.get(HELD, rows[0].bytes_per_token),
        decode_tokens_per_s=rows[0].decode_tokens_per_s,
    )


def shown_columns(rows: Iterable[Row]) -> list[Key]:
    """The metrics that a table shows, by task in order of appearance."""
    tasks = dict.fromkeys(r.task for r in rows if r.task != "speed")
    return [(task, metric) for task in tasks for metric in load_task(task).shown]


def recommend(found: Sequence[ChoiceSummary], most_rise: float) -> ChoiceSummary | None:
    """The choice of fewest bytes among those whose perplexity rises by at most `most_rise` (a share), and which do not
    break the model; the faster one of two alike. None where perplexity was not measured."""
    full = found[0]
    allowed = [s for s in found if (rise := s.rise(full)) is not None and rise <= most_rise and not broken(s, full)]
    return min(allowed, key=lambda s: (s.bytes_per_token, -s.decode_tokens_per_s), default=None)


def broken(choice: ChoiceSummary, full: ChoiceSummary) -> list[str]:
    """Why the choice breaks the model, in words; empty where it does not."""
    why: list[str] = []
    for (task, metric), theirs in full.values.items():
        mine = choice.values.get((task, metric))
        if metric.startswith("perplexity") and mine is not None and mine > (1 + BROKEN_RISE) * theirs:
            what = metric.replace("_", " ") + ("" if (task, metric) == PERPLEXITY else f" of {task}")
            why.append(f"{what} {as_rise(mine / theirs)}")
    if (agrees := choice.values.get(AGREEMENT)) is not None and agrees < BROKEN_AGREEMENT:
        why.append(f"its likeliest token is the full cache's in {agrees:.0%} of the steps only")
    for key, theirs in full.values.items():
        mine = choice.values.get(key)
        if key[1].endswith("seen_exact") and mine is not None and theirs >= 0.5 and mine < BROKEN_SHARE * theirs:
            why.append(f"{key[0]} {key[1].replace('_', ' ')} {mine:.0%} instead of {theirs:.0%}")
    return why


def as_rise(ratio: float) -> str:
    """+12.34%, or how many times as much where that would be a long number."""
    return f"{ratio - 1:+.2%}" if ratio < 3 else f"{ratio:,.3g} times"


def verdict_lines(found: Sequence[ChoiceSummary], most_rise: float) -> list[str]:
    """The recommended choice, then a line for each choice that breaks the model."""
    full, best = found[0], recommend(found, most_rise)
    lines: list[str] = []
    if best is not None and best is full:
        lines.append(f"at most {most_rise:.1%} perplexity: full; no other choice that was measured stays within it")
    elif best is not None:
        lines.append(
            f"at most {most_rise:.1%} perplexity: {best.cache}, {best.smaller(full):.1f}x smaller "
            f"({best.rise(full):+.2%} perplexity, {best.decode_tokens_per_s / full.decode_tokens_per_s:.2f}x the speed)"
        )
    else:
        lines.append("no recommendation: it needs the task ppl")
    for choice in found[1:]:
        if why := broken(choice, full):
            lines.append(f"{choice.cache} breaks this model: {'; '.join(why)}")
    if len(lines) > 1:
        lines.append("small models are the worst case for few bits and small budgets: larger ones bear more")
    return lines
