"""Options that several of the benchmarks take."""

from __future__ import annotations

from pathlib import Path

import click

PICTURES = (".svg", ".png")


def _can_be_written(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a picture's path before minutes are spent on what it is to show."""
    if path is None:
        return None
    if path.suffix.lower() not in PICTURES:
        raise click.BadParameter(f"{str(path)!r} does not end in {' or '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no directory {path.parent}")
    return path


threads_option = click.option("--threads", type=click.IntRange(1), help="Default: the cores there are.")
json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Write all numbers here; - for stdout.",
)
plot_option = click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_can_be_written,
    help="Write a picture here (.svg, .png).",
)
