"""Show which backend and instruction set run here, check them, measure the memory.

Exit status 1 where a kernel disagrees with the reference.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from typing import Any

import click
import torch

from kvarn import __version__
from kvarn.kernels import backend_report, load_backend
from kvarn.kernels._selfcheck import self_check
from kvarn.models.weights._check import check_weights

GB = 1e9


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--no-measure", is_flag=True, help="Leave the memory and the processor unmeasured.")
def COMMAND(as_json: bool, no_measure: bool) -> None:
    """Show which backend and instruction set run on this machine, check every kernel against the reference, and measure
    the memory's read bandwidth and the processor's float32 rate.

    Also each kind of weights' products against float64, with --numerics invariant and fast. Exit status 1 where a
    kernel disagrees with the reference, or a product leaves its bound.
    """
    found = examine(measure=not no_measure)
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
    else:
        for line in lines(found):
            click.echo(line)
    every = (*found["checks"].values(), found["weights"])
    if any(not c["ok"] for checks in every for c in checks):
        sys.exit(1)


def examine(*, measure: bool) -> dict[str, Any]:
    """Everything that the command shows."""
    reports = backend_report()
    reference = load_backend("reference")
    checks = {
        r.name: [{**asdict(c), "ok": c.ok} for c in self_check(load_backend(r.name), reference)]
        for r in reports
        if r.available and r.name != "reference"
    }
    native = any(r.name == "cpu" and r.available for r in reports)
    return {
        "kvarn": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "backend": load_backend().name,
        "backends": [asdict(r) for r in reports],
        "checks": checks,
        "weights": [{**asdict(c), "ok": c.ok} for c in check_weights()],
        "rates": _rates() if measure and native else None,
    }


def _rates() -> dict[str, Any]:
    """Only where the native backend was built."""
    from kvarn.kernels.cpu.probe import measure  # noqa: PLC0415

    return asdict(measure())


def lines(found: dict[str, Any]) -> list[str]:
    """For people; GB is 10^9 bytes."""
    out = [
        f"kvarn {found['kvarn']}, Python {found['python']}, PyTorch {found['torch']}, {found['machine']}, "
        f"{found['threads']} threads",
        "",
        "Backends",
    ]
    for r in found["backends"]:
        mark = "*" if r["name"] == found["backend"] else " " if r["available"] else "-"
        out.append(f"  {mark} {r['name']:10} {r['detail']}")
    if found["backend"] == "reference":
        out.append(
            "  The native kernels were not built: everything runs, slowly. Reinstall where a C++17 compiler is found."
        )
    for name, checks in found["checks"].items():
        bad = [c for c in checks if not c["ok"]]
        out += ["", f"Kernels of {name} against the reference: {len(checks) - len(bad)} of {len(checks)} agree"]
        lead = "" if bad else "nearest to its limit: "
        out += [f"  {lead}{c['name']}: error {c['error']:.2e}, limit {c['limit']:.2e}" for c in bad or _worst(checks)]
    out += [
        "",
        "Products of weights, root mean square error over float64's (1 row / 128 rows)",
        *_products(found["weights"]),
    ]
    if rates := found["rates"]:
        out += [
            "",
            f"Memory, read by {rates['threads']} threads: {rates['read_bytes_per_s'] / GB:.1f} GB/s",
            f"Float32, {rates['isa']}: {rates['float_ops_per_s'] / GB:.0f} GFLOP/s",
        ]
    return out


def _products(checks: list[dict[str, Any]]) -> list[str]:
    """A line a path."""
    out = []
    for few, many in zip(checks[::2], checks[1::2], strict=True):
        how = "invariant and fast" if few["shared"] else few["numerics"]
        bad = "" if few["ok"] and many["ok"] else "  beyond its bound, or not the same bits in any batch"
        out.append(f"  {few['weights']:10} {how:20} {few['error']:.1e} / {many['error']:.1e}{bad}")
    return out


def _worst(checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The check nearest to its limit."""
    return sorted(checks, key=lambda c: c["error"] / c["limit"])[-1:]
