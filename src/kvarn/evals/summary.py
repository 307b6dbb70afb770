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
HELD, RATE = ("speed", "held_bytes_per_token"), ("speed", "decode_tokens_per_s")
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)  # Student's t, 1 to 10 degrees of freedom

Key = tuple[str, str]  # task, metric


@dataclass(frozen=True)
class ChoiceSummary:
    """What one cache choice costs and keeps. values: by (task, metric), without details; errors: their standard errors
    where known (see Row), by as many samples. peak_bytes: over all tasks. decode_tokens_per_s: None where it was not
    measured together with the full cache's."""

    cache: str
    values: dict[Key, float] = field(default_factory=dict)
    peak_bytes: int = 0
    bytes_per_token: float = 0.0
    decode_tokens_per_s: float | None = None
    errors: dict[Key, float] = field(default_factory=dict)
    samples: dict[Key, int] = field(default_factory=dict)

    def rise(self, full: ChoiceSummary) -> float | None:
        """How much worse its perplexity is than the full cache's, as a share; None where it was not measured."""
        mine, theirs = self.values.get(PERPLEXITY), full.values.get(PERPLEXITY)
        return None if mine is None or theirs is None else mine / theirs - 1

    def rise_error(self, full: ChoiceSummary) -> float | None:
        """The standard error of its rise, window by window on the same text."""
        error, theirs = self.errors.get(PERPLEXITY), full.values.get(PERPLEXITY)
        return None if error is None or not theirs else error / theirs

    def rise_within(self, full: ChoiceSummary, most_rise: float) -> bool | None:
        """Whether perplexity rises by at most `most_rise` (a share). None: the windows that were measured do not tell,
        or it was not measured."""
        if self is full:
            return True
        rise, error = self.rise(full), self.rise_error(full)
        if rise is None:
            return None
        if rise > most_rise:
            return False
        return True if error is not None and rise + _margin(error, self.samples[PERPLEXITY]) <= most_rise else None

    def speedup(self, full: ChoiceSummary) -> float | None:
        mine, theirs = self.decode_tokens_per_s, full.decode_tokens_per_s
        return mine / theirs if mine and theirs else None

    def smaller(self, full: ChoiceSummary) -> float:
        """How many times fewer bytes it holds for a token of text."""
        return full.bytes_per_token / self.bytes_per_token if self.bytes_per_token else 1.0


def summaries(rows: Iterable[Row]) -> list[ChoiceSummary]:
    """One a choice, in order of appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.cache, []).append(row)
    together = _measured_together(next(iter(found.values()), []))
    return [_summary(cache, mine, together) for cache, mine in found.items()]


def _measured_together(rows: Sequence[Row]) -> str | None:
    """The fingerprint of the first choice's newest speed: only speeds that share it were measured together."""
    return next((r.fingerprint for r in reversed(rows) if (r.task, r.metric) == RATE), None)


def _summary(cache: str, rows: Sequence[Row], together: str | None) -> ChoiceSummary:
    comparable = (r for r in rows if (r.task, r.metric) != RATE or r.fingerprint == together)
    told = {(r.task, r.metric): r for r in comparable if not r.detail}
    values = {key: r.value for key, r in told.items()}
    return ChoiceSummary(
        cache=cache,
        values=values,
        peak_bytes=max(r.physical_bytes_peak for r in rows),
        bytes_per_token=values.get(HELD, rows[0].bytes_per_token),
        decode_tokens_per_s=values.get(RATE),
        errors={key: r.stderr for key, r in told.items() if r.stderr is not None},
        samples={key: len(r.samples) for key, r in told.items()},
    )


def _margin(error: float, samples: int) -> float:
    """How far above the measured mean the true one lies at most, in 95 of 100 cases (one-sided)."""
    degrees = max(1, samples - 1)
    t = T_95[degrees - 1] if degrees <= len(T_95) else 1.645 + 1.7 / degrees
    return t * error


def shown_columns(rows: Iterable[Row]) -> list[Key]:
    """The metrics that a table shows, by task in order of appearance."""
    tasks = dict.fromkeys(r.task for r in rows if r.task != "speed")
    return [(task, metric) for task in tasks for metric in load_task(task).shown]


def recommend(found: Sequence[ChoiceSummary], most_rise: float) -> ChoiceSummary | None:
    """The choice of fewest bytes among those whose perplexity surely rises by at most `most_rise` (a share), its error
    counted, and which do not break the model; the faster one of two alike. None where perplexity was not measured."""
    full = found[0]
    if PERPLEXITY not in full.values:
        return None
    allowed = [s for s in found if s.rise_within(full, most_rise) and not broken(s, full)]
    return min(allowed, key=lambda s: (s.bytes_per_token, -(s.decode_tokens_per_s or 0.0)), default=None)


def unresolved(found: Sequence[ChoiceSummary], most_rise: float) -> list[ChoiceSummary]:
    """Choices smaller than the recommended one that may or may not keep to `most_rise`: their rise does, and not beyond
    its error."""
    full, best = found[0], recommend(found, most_rise)
    if best is None:
        return []
    open_ = [s for s in found if s.rise(full) is not None and s.rise_within(full, most_rise) is None]
    return [s for s in open_ if s.bytes_per_token < best.bytes_per_token and not broken(s, full)]


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
    """The recommended choice, then what could be smaller but is not resolved, then a line for each choice that breaks
    the model."""
    full, best = found[0], recommend(found, most_rise)
    if best is None:
        lines = ["no recommendation: it needs the task ppl"]
    elif best is full:
        lines = [f"at most {most_rise:.1%} perplexity: full; no other choice that was measured surely stays within it"]
    else:
        figures = [f"{rise_text(best, full)} perplexity"]
        if (speedup := best.speedup(full)) is not None:
            figures.append(f"{speedup:.2f}x the speed")
        smaller = f"{best.smaller(full):.1f}x smaller"
        lines = [f"at most {most_rise:.1%} perplexity: {best.cache}, {smaller} ({', '.join(figures)})"]
    if unsure := unresolved(found, most_rise):
        told = ", ".join(f"{s.cache} ({rise_text(s, full)})" for s in unsure)
        windows = min(s.samples.get(PERPLEXITY, 0) for s in unsure)
        lines.append(f"not resolved (windows: {windows}): {told}; more --windows tell")
    if breaking := [(s, why) for s in found[1:] if (why := broken(s, full))]:
        lines += [f"{choice.cache} breaks this model: {'; '.join(why)}" for choice, why in breaking]
        lines.append("small models are the worst case for few bits and small budgets: larger ones bear more")
    return lines


def rise_text(choice: ChoiceSummary, full: ChoiceSummary) -> str:
    """+0.69% ± 0.35%; without the error where it is not known."""
    error = choice.rise_error(full)
    return as_rise(1 + (choice.rise(full) or 0.0)) + ("" if error is None else f" ± {error:.2%}")
