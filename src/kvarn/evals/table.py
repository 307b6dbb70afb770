"""The results as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvarn.evals.records import Row
from kvarn.evals.summary import ChoiceSummary, Key, broken, shown_columns, summaries

MIB = 1 << 20


def results_table(rows: Sequence[Row]) -> Table:
    """A line a choice: memory, speed, and what each task found."""
    found, columns = summaries(rows), shown_columns(rows)
    table = Table(title=f"{rows[0].model}: what each cache costs", title_justify="left")
    for name in header(columns):
        table.add_column(name, justify="left" if name == "cache" else "right")
    for choice in found:
        style = "red" if broken(choice, found[0]) else None
        table.add_row(*line(choice, found[0], columns), style=style)
    return table


def header(columns: Sequence[Key]) -> list[str]:
    return ["cache", "B/token", "smaller", "peak MiB", "tokens/s", *(f"{t} {m.replace('_', ' ')}" for t, m in columns)]


def line(choice: ChoiceSummary, full: ChoiceSummary, columns: Sequence[Key]) -> list[str]:
    """The texts of one choice's cells, as in `header`."""
    return [
        choice.cache,
        f"{choice.bytes_per_token:,.0f}",
        f"{choice.smaller(full):.2f}x",
        f"{choice.peak_bytes / MIB:,.1f}",
        f"{choice.decode_tokens_per_s:,.1f}",
        *(_cell(choice, full, key) for key in columns),
    ]


def _cell(choice: ChoiceSummary, full: ChoiceSummary, key: Key) -> str:
    if (value := choice.values.get(key)) is None:
        return "-"
    if key[1].endswith(("exact", "agreement")):
        return f"{value:.1%}"
    if key[1].startswith("perplexity"):
        base = full.values.get(key)
        rise = f" ({value / base - 1:+.2%})" if base and choice is not full else ""
        return f"{value:.3f}{rise}"
    return f"{value:.4f}"
