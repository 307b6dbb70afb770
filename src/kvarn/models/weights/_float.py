"""Float weights in one dtype, multiplied by oneDNN through PyTorch.

Where oneDNN is there the matrix is laid out for it once, at loading. Measured on a Zen 4 core with 3072 x 576 numbers
in bfloat16: 101 us against 236 us for `F.linear`, which lays it out at every call; with 16 rows 383 us against 640 us;
bit for bit the same. A laid-out product also gives a row the same bits whatever rows stand beside it, but for a single
row of more than SPLIT_COLUMNS columns; that is what invariant products avoid, and fast ones do not: 156 us against
174 us with 576 x 1536 numbers. Without oneDNN invariant products go through tiles of rows; with it, but none for
bfloat16, the numbers are widened for each call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.models.weights._bounds import of_floats
from kvarn.models.weights._ggml import decode, decode_into
from kvarn.models.weights.base import (
    LinearSpec,
    Product,
    RawBlocks,
    StepByStep,
    Table,
    TensorSource,
    WeightRoom,
    read_rows,
)

TILE_ROWS = 16
ROWS_HINT = 16  # the batch that the layout is chosen for; measured to be as good for 1 row as a hint of 1
# With more columns oneDNN sums a single row in pieces, so that its bits differ from those of the row among others.
SPLIT_COLUMNS = 1024
WIDENED_ROWS = 4096  # of a matrix at once, so that no large one stands in float32 as a whole


class DenseProduct(StepByStep):
    """x @ weight.T + bias, weight [rows, columns] as it is."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class TiledProduct(StepByStep):
    """x @ weight.T + bias by products of TILE_ROWS rows each: a row's bits do not hang on the rows beside it."""

    __slots__ = ("_dense",)

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._dense = DenseProduct(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -count % TILE_ROWS))
        return torch.cat([self._dense(tile) for tile in padded.split(TILE_ROWS)])[:count]

    def tensors(self) -> tuple[Tensor, ...]:
        return self._dense.tensors()


class WidenedProduct(StepByStep):
    """x @ weight.T + bias in float32, the weight kept in bfloat16: for processors on which oneDNN multiplies none.
    There PyTorch does it number by number: on Zen 1, 1536 x 576 numbers and 512 rows, 184 ms against 30 ms."""

    __slots__ = ("_bias", "_invariant", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, invariant: bool = True) -> None:
        self._weight, self._bias, self._invariant = weight, bias, invariant

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        parts = [PackedProduct(w.float(), None, self._invariant)(wide) for w in self._weight.split(WIDENED_ROWS)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return (out if self._bias is None else out + self._bias.float()).to(x.dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._weight,) if self._bias is None else (self._weight, self._bias)


class PackedProduct(StepByStep):
    """x @ weight.T + bias, the weight in oneDNN's own layout. invariant: a row has the same bits in any batch."""

    __slots__ = ("_bias", "_multiply", "_never_alone", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, invariant: bool = True) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        self._bias, self._multiply = bias, torch.ops.mkldnn._linear_pointwise.default
        self._never_alone = invariant and weight.shape[1] > SPLIT_COLUMNS

    def __call__(self, x: Tensor) -> Tensor:
        if self._never_alone and x.shape[0] == 1:
            return self._multiply(x.expand(2, -1), self._weight, self._bias, "none", [], "")[:1]
        return self._multiply(x, self._weight, self._bias, "none", [], "")

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._weight,) if self._bias is None else (self._weight, self._bias)


def packable(dtype: torch.dtype) -> bool:
    """Does this build of PyTorch, on this processor, offer laid-out products in `dtype`?"""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class DenseTable:
    """An embedding [rows, columns]."""

    __slots__ = ("_product", "_weight")

    def __init__(self, weight: Tensor, tied: bool, invariant: bool = True) -> None:
        self._weight, self._product = weight, float_product(weight, None, invariant) if tied else None

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._weight)

    def product(self) -> Product:
        return _tied(self._product)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._weight,) if self._product is None else (self._weight, *self._product.tensors())


class BlockTable:
    """An embedding kept in its file's quantized blocks and decoded row by row: the same numbers in less memory, and for
    tied weights the output's matrix is then the only float copy."""

    __slots__ = ("_dtype", "_product", "_raw")

    def __init__(
        self, raw: RawBlocks, shape: tuple[int, int], dtype: torch.dtype, tied: bool, invariant: bool = True
    ) -> None:
        self._raw, self._dtype, self._product = RawBlocks(raw.type, raw.data.clone()), dtype, None
        if tied:
            weight = torch.empty(shape, dtype=dtype)
            decode_into(weight, raw.type, raw.data.numpy())
            self._product = float_product(weight, None, invariant)

    def rows(self, ids: Tensor) -> Tensor:
        return decode(self._raw.type, self._raw.data[ids].numpy()).to(self._dtype)

    def product(self) -> Product:
        return _tied(self._product)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._raw.data,) if self._product is None else (self._raw.data, *self._product.tensors())


def _tied(product: Product | None) -> Product:
    assert product is not None, "the table was not asked for as tied"
    return product


def float_product(weight: Tensor, bias: Tensor | None = None, invariant: bool = True) -> Product:
    """The faster product that is to be had here. invariant: among those that give a row the same bits in any batch."""
    if packable(weight.dtype):
        return PackedProduct(weight, bias, invariant)
    if weight.dtype == torch.bfloat16 and packable(torch.float32):
        return WidenedProduct(weight, bias, invariant)
    return TiledProduct(weight, bias) if invariant else DenseProduct(weight, bias)


@dataclass(frozen=True)
class FloatKind:
    """Weights and activations in one float dtype. invariant: a row has the same bits in any batch."""

    name: str
    activations: torch.dtype
    invariant: bool = True

    def linear(self, spec: LinearSpec, source: TensorSource, room: WeightRoom | None = None) -> Product:
        return float_product(*read_rows(spec, source, self.activations), self.invariant)

    def table(
        self, name: str, shape: tuple[int, int], source: TensorSource, tied: bool, room: WeightRoom | None = None
    ) -> Table:
        """Tied weights laid out for oneDNN are a second copy, which the speed of the largest product is worth."""
        if (raw := source.raw(name)) is not None:
            return BlockTable(raw, shape, self.activations, tied, self.invariant)
        weight = torch.empty(shape, dtype=self.activations)
        source.read(name, weight)
        return DenseTable(weight, tied, self.invariant)

    def bound(self, x: Tensor, weight: Tensor) -> Tensor:
        return of_floats(x, weight, self.activations)
