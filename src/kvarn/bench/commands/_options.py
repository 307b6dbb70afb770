"""Options that several of the benchmarks take."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import click

PICTURES = (".svg", ".png")


def _can_be_written(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a path before minutes are spent on what is to be written there."""
    if path is None or str(path) == "-":
        return path
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no directory {path.parent}")
    if not path.exists() and not os.access(path.parent, os.W_OK):
        raise click.BadParameter(f"directory {path.parent} is not writable")
    return path


def _can_be_drawn(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """As above, and a picture."""
    if path is None:
        return None
    if path.suffix.lower() not in PICTURES:
        raise click.BadParameter(f"{str(path)!r} does not end in {' or '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise click.BadParameter("a picture needs matplotlib; try: pip install 'kvarn[serve]'")
    return _can_be_written(context, parameter, path)


threads_option = click.option("--threads", type=click.IntRange(1), help="Default: the cores there are.")
json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path, allow_dash=True),
    callback=_can_be_written,
    help="Write all numbers here; - for stdout.",
)
plot_option = click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_can_be_drawn,
    help="Write a picture here (.svg, .png).",
)
