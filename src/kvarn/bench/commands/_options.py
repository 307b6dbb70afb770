"""Options that several of the benchmarks take."""

from __future__ import annotations

from pathlib import Path

import click

threads_option = click.option("--threads", type=click.IntRange(1), help="Default: the cores there are.")
json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Write all numbers here; - for stdout.",
)
plot_option = click.option(
    "--plot", "plot_path", type=click.Path(path_type=Path), help="Write a picture here (.svg, .png)."
)
