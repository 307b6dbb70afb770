"""Compare Kvarn with the peers that are installed, side by side in one run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from kvarn.bench.cases import CASES
from kvarn.bench.commands._options import json_option
from kvarn.bench.commands._progress import doing
from kvarn.bench.compare import compare, table
from kvarn.bench.machine import machine
from kvarn.bench.peers import find_peers, kvarn
from kvarn.bench.room import fit_together
from kvarn.core.errors import InvalidRequest
from kvarn.hub import default_name, resolve
from kvarn.planner.hardware import usable_cores

NAMES = tuple(c.name for c in CASES)


@click.command("peers")
@click.argument("model", required=False)
@click.option("--case", "names", multiple=True, type=click.Choice(NAMES), help="Only these cases (default: all).")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Rounds; medians count.")
@click.option("--threads", type=click.IntRange(1), help="Of every engine (default: the cores there are).")
@click.option("--kv", "formats", multiple=True, help="Measure Kvarn with this cache too, e.g. int8.")
@click.option("--fast", is_flag=True, help="Measure Kvarn with --numerics fast too.")
@click.option("--only", multiple=True, help="Only peers whose name begins so.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("build/peers"),
    show_default=True,
    help="Where `make peers` put them.",
)
@json_option
def COMMAND(
    model: str | None,
    names: tuple[str, ...],
    repeats: int,
    threads: int | None,
    formats: tuple[str, ...],
    fast: bool,
    only: tuple[str, ...],
    folder: Path,
    json_path: Path | None,
) -> None:
    """Compare Kvarn with llama.cpp, OpenVINO GenAI, vLLM and transformers, whichever `make peers` could build: the same
    model, prompts, lengths and threads; repetitions interleaved, medians, and Kvarn's ratio to the best peer.

    llama.cpp and OpenVINO run with two forms of their cache, on the GGUF file and on a Q4_0 file made from it by
    llama.cpp's own llama-quantize; vLLM on its numbers in bfloat16, transformers too or, where the processor has no
    AVX-512, in float32. A peer's forms that are clearly slower than its best in a case's first round are left out of
    the others; the best one counts. In decode_32_at_2048 prompts are computed in the first round, and later ones go on
    decoding.
    """
    path = resolve(model or default_name()).path
    if not path.is_file():
        raise InvalidRequest(f"{path} is no GGUF file", fixes=("give a GGUF file, which all peers read",))
    found = find_peers(folder.resolve(), path)
    peers = [e for e in found.engines if not only or e.name.startswith(only)]
    engines = [kvarn(), *(kvarn(kv) for kv in formats), *([kvarn(None, "fast")] if fast else []), *peers]
    cases = [c for c in CASES if not names or c.name in names]
    threads = threads or usable_cores()
    about = machine(threads)
    with doing() as progress:
        result = compare(engines, cases, path, threads, repeats, progress, partial(fit_together, path, repeats))
    result.notes.extend(found.missing)
    numbers = json.dumps(result.as_dict(about), indent=2)
    if json_path is not None and str(json_path) != "-":
        json_path.write_text(numbers + "\n", encoding="utf-8")
    if json_path is not None and str(json_path) == "-":
        click.echo(numbers)
    else:
        Console().print(table(result))
        for note in result.notes:
            click.echo(note, err=True)
    if result.interrupted:
        raise KeyboardInterrupt
