"""Options that several of the benchmarks take."""

from __future__ import annotations

import os
from pathlib import Path

import click

PICTURES = (".svg", ".png")


def _can_be_written(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file's path before minutes are spent on what it is to hold."""
    if path is None or str(path) == "-":
        return path
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written")
    return path


def _can_be_drawn(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() not in PICTURES:
        raise click.BadParameter(f"{str(path)!r} does not end in {' or '.join(PICTURES)}")
    return _can_be_written(context, parameter, path)


threads_option = click.option("--threads", type=click.IntRange(1), help="Default: the cores there are.")
json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    callback=_can_be_written,
    help="Write all numbers here; - for stdout.",
)
plot_option = click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_can_be_drawn,
    help="Write a picture here (.svg, .png).",
)
