"""Measure what cache choices cost in quality, memory and speed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvarn import hub
from kvarn.cli._progress import progress_bars
from kvarn.core.errors import InvalidRequest
from kvarn.core.options import NUMERICS, EngineOptions

if TYPE_CHECKING:
    from kvarn.evals.choices import EvalChoice
    from kvarn.evals.records import Row
    from kvarn.evals.runner import Evaluation, Listener, Unit
    from kvarn.evals.tasks.base import Settings

CACHES = "full; int8; k=int8,v=int4; int4; window:512,sinks=4; h2o:50%; snapkv:50%"
TASKS = "ppl,kl"


class Numbers(click.ParamType):
    """Whole numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r}: write whole numbers, as 512,1024", param, ctx)
        if min(found) < 1:
            self.fail(f"{value!r}: each must be 1 or more", param, ctx)
        return found


class Share(click.ParamType):
    """A share: 1%, or 0.01."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = value.strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            self.fail(f"{value!r} is no share; write 1% or 0.01", param, ctx)
        if not (math.isfinite(share) and share >= 0):
            self.fail(f"{value!r}: a share is 0 or more", param, ctx)
        return share


@click.command("eval")
@click.argument("model", required=False)
@click.option("--caches", default=CACHES, show_default=True, metavar="CHOICES", help="With semicolons between them.")
@click.option("--tasks", default=TASKS, show_default=True, metavar="NAMES", help="With commas between them.")
@click.option("--text", type=click.Path(path_type=Path), metavar="FILE", help="Your own text instead of the shipped.")
@click.option("--lengths", type=Numbers(), default="512,1024", show_default=True, help="Of needle and recall (tokens).")
@click.option("--context-tokens", type=click.IntRange(2), default=1024, show_default=True, help="A window of ppl, kl.")
@click.option("--stride-tokens", type=click.IntRange(1), default=256, show_default=True, help="Of it, those scored.")
@click.option("--windows", type=click.IntRange(1), default=4, show_default=True, help="Windows of ppl, kl.")
@click.option("--cases", type=click.IntRange(1), default=8, show_default=True, help="Generated questions of a kind.")
@click.option("--stream-tokens", type=click.IntRange(96), help="How far stream goes (default: 4x the trained context).")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same questions.")
@click.option("--budget", type=Share(), default="1%", show_default=True, help="How much perplexity may rise.")
@click.option("--gate", is_flag=True, help="Keep the verdict on each lossy choice; exit code 1 where one fails.")
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="DIR", help="Default: kvarn-eval/MODEL.")
@click.option("--weights", default="native", metavar="KIND", show_default=True, help="As for kvarn run.")
@click.option(
    "--numerics",
    type=click.Choice(NUMERICS),
    default="invariant",
    show_default=True,
    help="As for kvarn run.",
)
@click.option("--block-size", type=click.IntRange(1), default=32, show_default=True, help="Tokens of a block.")
@click.option("--residual-tokens", type=click.IntRange(0), default=0, show_default=True)
@click.option("--backend", metavar="NAME", help="Kernels to use (default: the fastest that is built).")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="CPU threads (default: as PyTorch decides).")
def COMMAND(
    model: str | None,
    caches: str,
    tasks: str,
    text: Path | None,
    budget: float,
    gate: bool,
    out: Path | None,
    **given: Any,
) -> int:
    """Measure what cache choices cost in quality, memory and speed.

    MODEL as in kvarn run. Results go to DIR: results.jsonl, report.html, and pictures as SVG and PNG. Run again, it
    measures only what DIR does not hold yet, and all speeds together where a choice is new. A choice is what --kv of
    kvarn run takes; share=N before it measures --share-layers N. With --gate, kvarn run, chat and serve know which
    choices passed on this model.
    """
    from kvarn.evals.choices import parse_eval_choices  # noqa: PLC0415  (torch, which the help pages must not load)
    from kvarn.evals.records import Results  # noqa: PLC0415
    from kvarn.evals.runner import Evaluation  # noqa: PLC0415

    settings = _settings(text, given)
    choices = parse_eval_choices(caches)
    names = [name for name in re.split(r"[,;\s]+", tasks) if name]
    options = EngineOptions(
        **{key: given[key] for key in ("weights", "numerics", "block_size", "residual_tokens", "backend", "threads")}
    )
    with progress_bars() as progress:
        files = hub.resolve(model or hub.default_name(), progress=progress)
    out = out or Path("kvarn-eval") / re.sub(r"[^\w.-]+", "_", Path(files.name).name)
    evaluation = Evaluation(files, choices, names, settings, options, Results(out / "results.jsonl"))
    with _listening(evaluation) as listener:
        rows = evaluation.run(listener)
    _show(rows, budget, out)
    return _gate(rows, budget, evaluation.identity, settings.context_tokens, choices) if gate else 0


def _settings(text: Path | None, given: dict[str, Any]) -> Settings:
    from kvarn.evals.tasks.base import Settings  # noqa: PLC0415
    from kvarn.evals.texts import shipped_text  # noqa: PLC0415

    keys = ("lengths", "context_tokens", "stride_tokens", "windows", "cases", "stream_tokens", "seed")
    return Settings(text=shipped_text() if text is None else _read(text), **{key: given[key] for key in keys})


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def _listening(evaluation: Evaluation) -> Iterator[Listener]:
    """A bar with the time left on a terminal; otherwise a line for each task that is done."""
    from kvarn.evals.runner import Listener  # noqa: PLC0415

    console = Console(stderr=True, highlight=False)
    units = evaluation.units()
    if kept := sum(u.done for u in units):
        console.print(f"{kept} of {len(units)} measurements are there already")
    if not console.is_terminal:
        yield Listener(end=lambda unit, rows: console.print(_done_line(unit, rows), markup=False, soft_wrap=True))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as bar:
        total = sum(u.cost_tokens for u in units if not u.done)
        task = bar.add_task("tokens", total=total)
        yield Listener(
            begin=lambda unit: bar.update(task, description=f"{unit.cache} {unit.task}"),
            tick=lambda tokens: bar.advance(task, tokens),
        )
        bar.update(task, completed=total)


def _done_line(unit: Unit, rows: Sequence[Row]) -> str:
    several = len(unit.choices) > 1
    found = ", ".join(f"{r.cache + ' ' if several else ''}{r.metric} {r.value:.4g}" for r in rows if not r.detail)
    return f"{unit.cache} {unit.task}: {found}"


def _show(rows: Sequence[Row], budget: float, out: Path) -> None:
    """The table and the verdict to stdout, the pictures and the page into `out`."""
    from kvarn.evals.report import save_report  # noqa: PLC0415
    from kvarn.evals.summary import summaries, verdict_lines  # noqa: PLC0415
    from kvarn.evals.table import results_tables  # noqa: PLC0415

    console = Console(highlight=False)
    for table in results_tables(rows):
        console.print(table)
    for line in verdict_lines(summaries(rows), budget):
        console.print(line, markup=False, soft_wrap=True)
    *_, page = save_report(rows, budget, out)
    console.print(f"results and pictures: {page}", markup=False, soft_wrap=True)


def _gate(rows: Sequence[Row], budget: float, identity: str, context_tokens: int, choices: Sequence[EvalChoice]) -> int:
    """Keep and print the verdicts. Returns the exit code."""
    from kvarn.evals.gate import is_lossy, judge, record  # noqa: PLC0415
    from kvarn.evals.summary import summaries  # noqa: PLC0415

    lossy = [c.text for c in choices if is_lossy(c.params.format, c.params.policy, c.share_layers)]
    verdicts = judge(summaries(rows), budget, context_tokens, identity, lossy)
    record(verdicts)
    for verdict in verdicts:
        click.echo(f"gate: {verdict}")
    return 0 if all(v.passed for v in verdicts) else 1
