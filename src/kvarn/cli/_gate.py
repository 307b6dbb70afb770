"""What is said before a lossy cache is used: whether it was judged on this model."""

from __future__ import annotations

import click

from kvarn.core.files import ModelFiles
from kvarn.core.options import EngineOptions


def pass_gate(files: ModelFiles, options: EngineOptions, *, required: bool) -> None:
    """One line on stderr where the options' choice of cache loses information and has not passed `kvarn eval --gate`.
    required: refuse it instead. Raises IncompatiblePlan, and what `parse_choice` raises."""
    from kvarn.evals.choices import EvalChoice  # noqa: PLC0415  (torch, which the help pages must not load)
    from kvarn.evals.gate import check_gate, is_lossy  # noqa: PLC0415
    from kvarn.kv.choice import parse_choice  # noqa: PLC0415

    params = parse_choice(options.kv or "full")
    lossy = is_lossy(params.format, params.policy, options.share_layers)
    cache = EvalChoice(params, options.share_layers).text
    if line := check_gate(files, cache, lossy=lossy, required=required):
        click.echo(f"note: {line}", err=True)
