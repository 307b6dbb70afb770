"""Show a model's layers, weights and what its KV cache costs a token."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from kvarn import hub
from kvarn.cli._inspection import Inspection, inspect_model, layer_kind
from kvarn.cli._progress import progress_bars
from kvarn.core.errors import InvalidRequest


@click.command("inspect")
@click.argument("model", required=False)
@click.option("--kv", metavar="FORMAT", help="KV format to count in (default: the model's own precision).")
@click.option("--block-size", type=int, default=32, show_default=True, help="Tokens of a block.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def COMMAND(model: str | None, kv: str | None, block_size: int, as_json: bool) -> None:
    """Show a model's layers, weights and what its KV cache costs a token, every factor written out.

    Reads headers and configs only; of a hub id that was not fetched, only the config is. MODEL is as for kvarn run.
    """
    if block_size < 1:
        raise InvalidRequest(f"block_size is {block_size}", fixes=("use 1 or more",))
    with progress_bars() as progress:
        files = hub.resolve_config(model or hub.default_name(), progress)
    try:
        found = inspect_model(files, kv, block_size)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    if as_json:
        click.echo(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        for line in lines(found):
            click.echo(line)


def lines(found: Inspection) -> Iterator[str]:
    """For people; GB is 10^9 bytes, GiB 2^30."""
    geometry = found.geometry
    yield f"{found.files.name}: {geometry.architecture}, {found.files.kind} at {found.files.path}"
    context = f"{geometry.max_context:,} tokens" if geometry.max_context else "unstated"
    yield f"  hidden {geometry.hidden_size:,}, vocabulary {geometry.vocab_size:,}, context {context}"
    if geometry.parameters:
        yield f"  {geometry.parameters.total:,} parameters"
    yield ""
    yield f"Layers: {len(geometry.layers)}"
    kinds = [layer_kind(spec) for spec in geometry.layers]
    for kind in dict.fromkeys(kinds):
        yield f"  {kinds.count(kind):3} x {kind}"
    yield ""
    yield from _kv_lines(found)
    yield ""
    yield f"Weights: {size(sum(found.weights.values()))}" if found.weights else "Weights: not fetched"
    for name, nbytes in found.weights.items():
        yield f"  {name:8} {size(nbytes)}"
    for note in geometry.notes:
        yield f"note: {note}"


def _kv_lines(found: Inspection) -> Iterator[str]:
    yield f"KV cache, {found.format.name}: {found.bytes_per_token:,} bytes a token"
    for cost in found.groups:
        window = f"; at most {cost.window_tokens:,} tokens" if cost.window_tokens else ""
        yield f"  {cost.factors} bytes a token ({cost.attention}{window})"
    if found.state_bytes:
        yield f"  recurrent state: {found.state_bytes:,} bytes a sequence, whatever its length"
    if found.geometry.max_context:
        tokens = found.geometry.max_context
        yield f"  one sequence of {tokens:,} tokens: {size(found.kv_bytes(tokens))}"


def size(nbytes: int) -> str:
    """Exact bytes, with GiB or MiB and GB or MB beside them."""
    binary = f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.2f} MiB"
    decimal = f"{nbytes / 1e9:,.2f} GB" if nbytes >= 2**30 else f"{nbytes / 1e6:,.2f} MB"
    return f"{nbytes:,} bytes = {binary} = {decimal}"
