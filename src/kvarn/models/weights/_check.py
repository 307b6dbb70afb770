"""Every way to multiply weights against float64, on this machine: what `kvarn doctor` shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.core.options import NUMERICS, Numerics
from kvarn.core.registry import load, names_in
from kvarn.models.weights._ggml import decode
from kvarn.models.weights.base import LinearSpec, RawBlocks, WeightKind

PACKAGE = "kvarn.models.weights"
ROWS, COLUMNS = 160, 576
FEW, MANY = 1, 128  # rows of activations: a decode step's, a prompt's
Q4_0_BYTES = 18


@dataclass(frozen=True, slots=True)
class PathCheck:
    """One weight kind's products of `rows` rows. error: root mean square of the error over that of the exact numbers.
    of_bound: the largest share of the stated bound that an error reached. same_bits: whether the first row had the same
    bits alone as among the others; True is promised by `invariant`. shared: fast and invariant are one path."""

    weights: str
    numerics: Numerics
    rows: int
    error: float
    of_bound: float
    same_bits: bool
    shared: bool

    @property
    def ok(self) -> bool:
        return self.of_bound <= 1 and (self.same_bits or self.numerics == "fast")


def check_weights() -> tuple[PathCheck, ...]:
    """Each kind, invariant and fast, for one row and for many; the matrix is one that a file holds in 4 bits."""
    kinds: dict[tuple[str, Numerics], WeightKind] = {
        (name, n): _kind(name, n) for name in names_in(PACKAGE) for n in NUMERICS
    }
    return tuple(
        _check(name, numerics, rows, kind, shared=kind is kinds[name, "invariant"] is kinds[name, "fast"])
        for (name, numerics), kind in kinds.items()
        if numerics == "invariant" or kind is not kinds[name, "invariant"]
        for rows in (FEW, MANY)
    )


def _kind(name: str, numerics: Numerics) -> WeightKind:
    return load(PACKAGE, name, "FAST" if numerics == "fast" else "KIND", "weight kind")


class Blocks:
    """A source of one matrix in Q4_0."""

    provenance, norms_include_one = "random blocks", False

    def __init__(self) -> None:
        seeded = torch.Generator().manual_seed(0)
        shape = (ROWS, COLUMNS // 32, Q4_0_BYTES)
        blocks = torch.randint(0, 256, shape, generator=seeded, dtype=torch.uint8)
        scales = torch.rand((*shape[:2], 1), generator=seeded) * 0.02 + 0.001
        blocks[..., :2] = scales.half().view(torch.uint8)
        self.data = blocks.flatten(1)
        self.numbers = decode("Q4_0", self.data.numpy())

    def shape(self, name: str) -> tuple[int, ...] | None:
        return (ROWS, COLUMNS)

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self.numbers)

    def raw(self, name: str) -> RawBlocks | None:
        return RawBlocks("Q4_0", self.data)


def _check(name: str, numerics: Numerics, rows: int, kind: WeightKind, *, shared: bool) -> PathCheck:
    source = Blocks()
    product = kind.linear(LinearSpec((("a", ROWS),), COLUMNS), source)
    x = torch.randn((MANY, COLUMNS), generator=torch.Generator().manual_seed(1)).to(kind.activations)
    mine, weight = x[:rows], source.numbers.double()
    got, exact = product(mine).double(), mine.double() @ weight.T
    off = (got - exact).abs()
    return PathCheck(
        name,
        numerics,
        rows,
        (off.pow(2).mean() / exact.pow(2).mean()).sqrt().item(),
        (off / kind.bound(mine.double(), weight)).max().item(),
        torch.equal(product(x[:1]), product(x)[:1]),
        shared,
    )
