"""Measure what the cache buys: time a token with and without it, and memory in blocks against one reservation."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvarn.bench.commands._options import json_option, plot_option, threads_option
from kvarn.bench.commands._progress import doing
from kvarn.bench.commands.engine import numbers
from kvarn.bench.machine import machine
from kvarn.bench.plots import plot_cache
from kvarn.bench.sweep import Growth, Use, growth, utilisation
from kvarn.hub import default_name, resolve
from kvarn.planner.hardware import usable_cores


@click.command("cache")
@click.argument("model", required=False)
@click.option("--lengths", default="64,128,256,512", show_default=True, help="Texts at which a token is timed.")
@click.option("--requests", type=click.IntRange(1), default=24, show_default=True, help="Of the mix of lengths.")
@click.option("--context", type=click.IntRange(64), default=1024, show_default=True, help="What a request may reach.")
@click.option("--kv-memory-mib", type=click.IntRange(1), default=192, show_default=True, help="For the mix.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the mix.")
@threads_option
@json_option
@plot_option
def COMMAND(
    model: str | None,
    lengths: str,
    requests: int,
    context: int,
    kv_memory_mib: int,
    seed: int,
    threads: int | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure what the cache buys: the time of a token with and without it as the text grows, and how full memory is,
    in blocks against one reservation a request, while a mix of request lengths runs."""
    files, threads = resolve(model or default_name()), threads or usable_cores()
    about, mix = machine(threads), _mix(requests, context, seed)
    with doing(every_s=5) as progress:
        grown = growth(files, sorted(numbers(lengths)), threads, progress)
        uses = utilisation(files, mix, context, kv_memory_mib << 20, threads, progress)
    report = {"machine": about, "growth": asdict(grown), "utilisation": [_summary(u) for u in uses]}
    if json_path is not None and str(json_path) != "-":
        json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot_path is not None:
        plot_cache(grown, uses, plot_path)
    if json_path is not None and str(json_path) == "-":
        click.echo(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(_growth_table(grown))
    console.print(_use_table(uses))


def _mix(requests: int, context: int, seed: int) -> list[tuple[int, int]]:
    """Most requests are short and some are long: log-uniform prompts and answers that fit the context."""
    draw = random.Random(seed)
    pairs = ((int(context ** draw.uniform(0.3, 0.8)), int(context ** draw.uniform(0.3, 0.7))) for _ in range(requests))
    return [(max(1, p), max(1, min(a, context - p - 1))) for p, a in pairs]


def _summary(use: Use) -> dict[str, float | str | int]:
    return {
        "cache": use.cache,
        "mean_utilisation": use.mean_utilisation,
        "most_running": max(use.running, default=0),
        "steps": len(use.utilisation),
        "seconds": use.seconds,
    }


def _growth_table(grown: Growth) -> Table:
    shown = Table(title="ms a token")
    for name in ("text so far", "with cache", "without", "times faster"):
        shown.add_column(name, justify="right")
    for tokens, fast, slow in zip(grown.tokens, grown.with_cache_s, grown.without_s, strict=True):
        shown.add_row(f"{tokens:,}", f"{fast * 1e3:,.1f}", f"{slow * 1e3:,.1f}", f"{slow / fast:,.1f}")
    return shown


def _use_table(uses: list[Use]) -> Table:
    shown = Table(title="a mix of lengths in the same memory")
    for name in ("cache", "tokens stored / reserved", "most requests at once", "steps", "seconds"):
        shown.add_column(name, justify="right")
    for use in uses:
        full, most = f"{use.mean_utilisation:.0%}", str(max(use.running, default=0))
        shown.add_row(use.cache, full, most, str(len(use.utilisation)), f"{use.seconds:,.1f}")
    return shown
