"""Writes an evaluation's pictures and its page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from kvarn.core.errors import KvarnError
from kvarn.evals.plots import as_svg, pictures
from kvarn.evals.records import Row
from kvarn.evals.summary import broken, recommend, shown_columns, summaries, verdict_lines
from kvarn.evals.table import header, line

STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222;background:#fff}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{border-bottom:1px solid #ddd;padding:.3rem .7rem;text-align:right}"
    "th:first-child,td:first-child{text-align:left}.broken{color:#a00}.best{font-weight:bold}"
    ".wide{overflow-x:auto}svg{max-width:100%;height:auto}"
)


def save_report(rows: Sequence[Row], most_rise: float, out: Path) -> list[Path]:
    """Write memory.svg, speed.svg, needle.svg (where it ran), the same as .png, and report.html, which stands alone.
    most_rise: of perplexity, as a share, for the recommended choice. Returns the files. Raises KvarnError: no
    matplotlib, or a file that cannot be written."""
    best = recommend(summaries(rows), most_rise)
    drawn = pictures(rows, best.cache if best else None, most_rise)
    try:
        out.mkdir(parents=True, exist_ok=True)
        written: list[Path] = []
        for name, figure in drawn.items():
            for suffix in ("svg", "png"):
                figure.savefig(path := out / f"{name}.{suffix}")
                written.append(path)
        page = out / "report.html"
        page.write_text(page_of(rows, most_rise, {n: as_svg(f) for n, f in drawn.items()}), encoding="utf-8")
    except OSError as error:
        raise KvarnError(f"cannot write into {out}: {error.strerror or error}") from error
    return [*written, page]


def page_of(rows: Sequence[Row], most_rise: float, svgs: dict[str, str]) -> str:
    """The page: the verdict, the table, the pictures."""
    title = escape(f"{rows[0].model}: what each cache costs")
    found = summaries(rows)
    verdict = "".join(f"<p>{escape(text)}</p>\n" for text in verdict_lines(found, most_rise))
    drawings = "".join(f"<h2>{escape(TITLES[name])}</h2>\n{svg}\n" for name, svg in svgs.items())
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style></head>\n'
        f'<body>\n<h1>{title}</h1>\n{verdict}<div class="wide">{_table(rows, most_rise)}</div>\n'
        f"{drawings}{NOTES}</body>\n</html>\n"
    )


TITLES = {
    "memory": "Memory against quality",
    "speed": "Speed against quality",
    "needle": "A pass key by depth and length",
}
NOTES = (
    "<p>B/token: blocks held after a prompt, over the tokens of its text. Peak: the fullest moment of any task, the "
    "prompt's prefill included, which a policy cuts only when it is complete. Seen: the question stood in the prompt "
    "when tokens were dropped; unseen: it came later. Log-probabilities are nats a token of the right answer. "
    "&plusmn;: standard error over windows or questions, of the difference to the full cache on the same ones; of a "
    "speed, over turns that the caches took one after the other.</p>\n"
)


def _table(rows: Sequence[Row], most_rise: float) -> str:
    found, columns = summaries(rows), shown_columns(rows)
    best = recommend(found, most_rise)
    head = "".join(f"<th>{escape(name)}</th>" for name in header(columns))
    lines: list[str] = []
    for choice in found:
        kind = "broken" if broken(choice, found[0]) else "best" if choice == best else ""
        cells = "".join(f"<td>{escape(text)}</td>" for text in line(choice, found[0], columns))
        lines.append(f'<tr class="{kind}">{cells}</tr>' if kind else f"<tr>{cells}</tr>")
    return f"<table>\n<tr>{head}</tr>\n" + "\n".join(lines) + "\n</table>"
