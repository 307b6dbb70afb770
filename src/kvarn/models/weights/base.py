"""What a weight kind offers. A kind turns tensors of a model's file into products that a layer calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvarn.kernels._arena import Arena
from kvarn.kernels.api import Backend, CodeMatrix

# From here on fewer scales pay: one a row of a matrix is 1.3 times as fast as Q4_1's, at 16 rows 1.1.
MANY_ROWS = 64


@dataclass(frozen=True, slots=True)
class RawBlocks:
    """A quantized tensor as its file holds it. type: ggml's name; data [rows, bytes a row] uint8, rows in the order of
    the float tensor."""

    type: str
    data: Tensor


class TensorSource(Protocol):
    """Tensors by Hugging Face name, whatever the file calls them."""

    provenance: str
    norms_include_one: bool  # norm weights that models apply as (1 + w) are stored as 1 + w

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The tensor's shape in Hugging Face's layout; None: there is no such tensor."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Fill `out` (a float tensor of the tensor's shape) with its numbers. Thread-safe. Raises ModelError."""
        ...

    def raw(self, name: str) -> RawBlocks | None:
        """The tensor's quantized blocks, rows in the float tensor's order; None where the file holds floats."""
        ...


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One product as a layer asks for it: the named tensors one below the other, so that several become one product.

    parts: (name without `.weight`, output features) of each. columns: input features. bias: also read `.bias` of each.
    """

    parts: tuple[tuple[str, int], ...]
    columns: int
    bias: bool = False

    @property
    def rows(self) -> int:
        return sum(count for _, count in self.parts)


class Product(Protocol):
    """A packed matrix: called with x [T, columns], returns [T, rows] in x's dtype (logits may be float32). The other
    methods join it with the steps around it, which some kinds do in one call; residual [T, rows] is added."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def normed(self, x: Tensor, weight: Tensor, eps: float, kernels: Backend) -> Tensor:
        """The product of rms_norm(x, weight)."""
        ...

    def added(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """residual + the product of x."""
        ...

    def gated(self, x: Tensor, activation: str, residual: Tensor | None, kernels: Backend) -> Tensor:
        """residual + the product of activation(gate) * up, x [T, 2 * columns] being gate and then up."""
        ...

    def codes(self, rows: int) -> CodeMatrix | None:
        """The matrix of codes that multiplies so many rows; None where something else does."""
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds; their bytes are its memory."""
        ...

    @property
    def read_bytes(self) -> int:
        """What the product of a single row reads of them."""
        ...


class StepByStep:
    """The steps around a product, one call each."""

    __slots__ = ()

    def codes(self, rows: int) -> CodeMatrix | None:
        return None

    def normed(self: Product, x: Tensor, weight: Tensor, eps: float, kernels: Backend) -> Tensor:
        return self(kernels.rms_norm(x, weight, eps))

    def added(self: Product, x: Tensor, residual: Tensor | None) -> Tensor:
        return self(x) if residual is None else residual + self(x)

    def gated(self: Product, x: Tensor, activation: str, residual: Tensor | None, kernels: Backend) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.added(kernels.gated(gate, up, activation), residual)

    @property
    def read_bytes(self: Product) -> int:
        return total_bytes(self.tensors())


class Table(Protocol):
    """An embedding: rows by index, and for tied weights the product with the same numbers."""

    def rows(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, columns] in the kind's activation dtype."""
        ...

    def product(self) -> Product:
        """hidden [T, columns] -> [T, rows] with the same numbers, of a table that was asked for as tied."""
        ...

    def tensors(self) -> tuple[Tensor, ...]: ...


class WeightRoom:
    """Where weights are laid: the form that every product has, and the second one that `fast` adds to some.
    second_bytes: the most that second forms may take; None: as much as they want."""

    def __init__(self, second_bytes: int | None = None) -> None:
        self.first, self.second = Arena(), Arena()
        self._left_bytes = second_bytes

    def grants(self, n_bytes: int) -> bool:
        """Whether a second form may take so much; if so, it is taken."""
        if self._left_bytes is None:
            return True
        if n_bytes > self._left_bytes:
            return False
        self._left_bytes -= n_bytes
        return True


class WeightKind(Protocol):
    """One way to hold weights. Each file of this package defines `KIND`, whose products give a row the same bits
    whatever rows stand beside it (`--numerics invariant`), and `FAST`, which may promise less where that is faster;
    where it is not, both are the same object."""

    name: str
    activations: torch.dtype

    def linear(self, spec: LinearSpec, source: TensorSource, room: WeightRoom | None = None) -> Product:
        """Read the parts and pack them; room: where what is packed may lie."""
        ...

    def table(
        self, name: str, shape: tuple[int, int], source: TensorSource, tied: bool, room: WeightRoom | None = None
    ) -> Table:
        """Read an embedding; tied: its product is wanted too."""
        ...

    def bound(self, x: Tensor, weight: Tensor) -> Tensor:
        """The most by which the product of x [T, K] (numbers that the activations' dtype holds) with the numbers
        weight [N, K], both float64, differs from the exact one: [T, N]."""
        ...


def read_rows(spec: LinearSpec, source: TensorSource, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The parts' numbers one below the other, read straight into place: weight [rows, columns], bias [rows] or None."""
    weight = torch.empty((spec.rows, spec.columns), dtype=dtype)
    bias = torch.empty(spec.rows, dtype=dtype) if spec.bias else None
    at = 0
    for name, count in spec.parts:
        source.read(f"{name}.weight", weight[at : at + count])
        if bias is not None:
            source.read(f"{name}.bias", bias[at : at + count])
        at += count
    return weight, bias


def read_vector(name: str, size: int, source: TensorSource) -> Tensor:
    """A small tensor (a norm's weight) [size] in float32."""
    out = torch.empty(size, dtype=torch.float32)
    source.read(name, out)
    return out


def total_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of `tensors`, a shared one counted once. (A matrix in oneDNN's layout has no storage to ask.)"""
    return sum({id(t): t.nbytes for t in tensors}.values())
