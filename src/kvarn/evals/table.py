"""The results as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvarn.evals.records import Row
from kvarn.evals.summary import RATE, ChoiceSummary, Key, as_rise, broken, shown_columns, summaries

MIB = 1 << 20
FIXED = ("cache", "B/token", "smaller", "peak MiB", "tokens/s")


def results_tables(rows: Sequence[Row]) -> list[Table]:
    """A line a choice: first memory and speed, then a table for each task."""
    columns = shown_columns(rows)
    tasks = dict.fromkeys(task for task, _ in columns)
    first = _table(rows, f"{rows[0].model}: memory and speed", [], 1)
    return [first, *(_table(rows, task, [c for c in columns if c[0] == task], len(FIXED)) for task in tasks)]


def _table(rows: Sequence[Row], title: str, columns: Sequence[Key], skip: int) -> Table:
    """The fixed columns from the second to `skip` are left out."""
    found = summaries(rows)
    table = Table(title=title, title_justify="left")
    for name in _without(header(columns), skip):
        table.add_column(name, justify="left" if name == "cache" else "right")
    for choice in found:
        style = "red" if broken(choice, found[0]) else None
        table.add_row(*_without(line(choice, found[0], columns), skip), style=style)
    return table


def _without(cells: Sequence[str], skip: int) -> list[str]:
    return [cells[0], *cells[skip:]]


def header(columns: Sequence[Key]) -> list[str]:
    return [*FIXED, *(f"{task} {metric.replace('_', ' ')}" for task, metric in columns)]


def line(choice: ChoiceSummary, full: ChoiceSummary, columns: Sequence[Key]) -> list[str]:
    """The texts of one choice's cells, as in `header`."""
    return [
        choice.cache,
        f"{choice.bytes_per_token:,.0f}",
        f"{choice.smaller(full):.2f}x",
        f"{choice.peak_bytes / MIB:,.1f}",
        _rate(choice),
        *(_cell(choice, full, key) for key in columns),
    ]


def _rate(choice: ChoiceSummary) -> str:
    """Tokens a second, where they were measured together with the full cache's."""
    if (rate := choice.decode_tokens_per_s) is None:
        return "-"
    error = choice.errors.get(RATE)
    return f"{rate:,.1f}" + ("" if error is None else f" ± {error:.1f}")


def _cell(choice: ChoiceSummary, full: ChoiceSummary, key: Key) -> str:
    if (value := choice.values.get(key)) is None:
        return "-"
    error = choice.errors.get(key) if choice is not full else None
    if key[1].endswith(("exact", "agreement")):
        return f"{value:.1%}" + ("" if error is None else f" ± {error:.1%}")
    if key[1].startswith("perplexity"):
        base = full.values.get(key)
        beside = "" if not base or error is None else f" ± {error / base:.2%}"
        rise = f" ({as_rise(value / base)}{beside})" if base and choice is not full else ""
        return f"{value:,.3f}{rise}"
    return f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
