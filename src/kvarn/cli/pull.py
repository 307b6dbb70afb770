"""Fetch a model, so that it can be used offline."""

from __future__ import annotations

import click

from kvarn import hub
from kvarn.cli._progress import progress_bars
from kvarn.hub.names import short_name


@click.command("pull")
@click.argument("name", required=False)
@click.option("--list", "list_names", is_flag=True, help="Print the short names instead.")
def COMMAND(name: str | None, list_names: bool) -> None:
    """Fetch a model and print where it lies.

    NAME is a short name (see --list; without one, the default), a Hugging Face hub id (org/name or org/name/file.gguf),
    or a local path, which is only checked. Models with a short name are kept in KVARN_HOME (default: the platform's
    cache directory), hub models in huggingface_hub's own cache. What is there already is not fetched again.
    """
    if list_names:
        for known in hub.short_names():
            click.echo(f"{known:16} {short_name(known).description}")
        return
    wanted = name or hub.default_name()
    with progress_bars() as progress:
        files = hub.resolve(wanted, progress=progress)
    click.echo(str(files.path))
    click.echo(f"{wanted}: {files.kind}, {files.size_bytes / 1e6:,.1f} MB in {len(files.weights)} file(s)", err=True)
