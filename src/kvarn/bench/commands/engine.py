"""Measure Kvarn's engine: prefill, decoding at depth, batches, KV formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvarn.bench.commands._options import json_option, plot_option, threads_option
from kvarn.bench.commands._progress import doing
from kvarn.bench.machine import machine
from kvarn.bench.plots import plot_sweep
from kvarn.bench.roofline import roofline
from kvarn.bench.sweep import Figure, engine_cases, sweep
from kvarn.core.options import NUMERICS, Numerics
from kvarn.engine.llm import LLM
from kvarn.hub import default_name, resolve
from kvarn.planner.hardware import usable_cores

WAYS: dict[str, Sequence[Numerics]] = {"invariant": ("invariant",), "fast": ("fast",), "both": NUMERICS}


def numbers(text: str) -> list[int]:
    """'1,4,16' -> [1, 4, 16]. Raises click.BadParameter."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not numbers with commas between") from error
    if min(found) < 1:
        raise click.BadParameter(f"{text!r} holds a number below 1")
    return found


@click.command("engine")
@click.argument("model", required=False)
@click.option("--kv", "formats", multiple=True, help="Measure this cache too (repeat for more), e.g. int8, int4.")
@click.option("--weights", default="native", show_default=True, metavar="KIND", help="See kvarn run.")
@click.option(
    "--numerics",
    type=click.Choice([*WAYS]),
    default="invariant",
    show_default=True,
    help="See kvarn run; both: one beside the other.",
)
@click.option("--depths", default="32,1024,4096", show_default=True, help="Contexts to decode at, in tokens.")
@click.option("--batches", default="1,4,16,32", show_default=True, help="Streams at once, at a short context.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Rounds; medians count.")
@threads_option
@json_option
@plot_option
def COMMAND(
    model: str | None,
    formats: tuple[str, ...],
    weights: str,
    numerics: str,
    depths: str,
    batches: str,
    repeats: int,
    threads: int | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure Kvarn's engine: prompts, decoding at several depths and batches, with one or more caches; and what share
    of the memory's speed a decode step reaches."""
    files, threads = resolve(model or default_name()), threads or usable_cores()
    about, cases = machine(threads), engine_cases(numbers(depths), numbers(batches))
    with doing() as progress:
        figures = sweep(files, (None, *formats), cases, repeats, threads, progress, WAYS[numerics], weights)
        shortest = min((f for f in figures if f.case.counted == "decode"), key=lambda f: f.case.prompt_tokens)
        llm = LLM(files, threads=threads, weights=weights, max_seqs=1, context_tokens=64)
        reached = roofline(llm, shortest.case.streams, shortest.case.prompt_tokens, 1 / shortest.value, threads)
    report = _as_dict(figures, about, reached.line())
    if json_path is not None and str(json_path) != "-":
        json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot_path is not None:
        plot_sweep(figures, plot_path)
    if json_path is not None and str(json_path) == "-":
        click.echo(json.dumps(report, indent=2))
        return
    Console().print(_table(figures))
    click.echo(reached.line())


def _as_dict(figures: list[Figure], about: dict[str, Any], line: str) -> dict[str, Any]:
    results = [
        {"case": f.case.name, "engine": f.engine, "value": f.value, "unit": "tokens/s", "runs": list(f.runs)}
        for f in figures
    ]
    default = figures[0].engine
    own = {f.case.name: f.value for f in figures if f.engine == default}
    ratios = [
        {"case": f.case.name, "cache": f.engine, "ratio_to_default": f.value / own[f.case.name]}
        for f in figures
        if f.engine != default
    ]
    return {"machine": about, "results": results, "ratios": ratios, "roofline": line}


def _table(figures: list[Figure]) -> Table:
    shown = Table(title="tokens/s, medians")
    shown.add_column("case")
    engines = list(dict.fromkeys(f.engine for f in figures))
    for engine in engines:
        shown.add_column(engine, justify="right")
    values = {(f.case.name, f.engine): f.value for f in figures}
    for case in dict.fromkeys(f.case.name for f in figures):
        shown.add_row(case, *(f"{values[case, engine]:,.1f}" for engine in engines))
    return shown
