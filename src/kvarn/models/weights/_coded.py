"""Weight kinds that multiply codes: which form a tensor takes, and the products a layer calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.kernels import code_matrix
from kvarn.kernels._arena import Arena
from kvarn.kernels.api import Backend, CodeMatrix, Codes
from kvarn.models.weights._bounds import of_codes
from kvarn.models.weights._codes import stack, wide_bytes, wide_group
from kvarn.models.weights.base import (
    MANY_ROWS,
    LinearSpec,
    Product,
    RawBlocks,
    Table,
    TensorSource,
    WeightRoom,
    total_bytes,
)

# How one tensor is held: its raw blocks where the file is quantized, and a way to read its numbers [N, K] float32.
Choice = Callable[[RawBlocks | None, Callable[[], Tensor]], Codes]


class CodeProduct:
    """x @ weight.T + bias over codes, with the steps around it in the same call."""

    __slots__ = ("_matrix", "_result")

    def __init__(self, matrix: CodeMatrix, result: torch.dtype | None = None) -> None:
        """result: dtype of results, None for that of the activations."""
        self._matrix, self._result = matrix, result

    def __call__(self, x: Tensor) -> Tensor:
        return self._matrix.product(x, self._result)

    def normed(self, x: Tensor, weight: Tensor, eps: float, kernels: Backend) -> Tensor:
        return self._matrix.normed(x, weight, eps)

    def added(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self._matrix.product(x, self._result, residual)

    def gated(self, x: Tensor, activation: str, residual: Tensor | None, kernels: Backend) -> Tensor:
        return self._matrix.gated(x, activation, residual)

    def codes(self, rows: int) -> CodeMatrix | None:
        return self._matrix if self._result is None else None

    def tensors(self) -> tuple[Tensor, ...]:
        return self._matrix.tensors()

    @property
    def read_bytes(self) -> int:
        return total_bytes(self.tensors())


class CodeTable:
    """An embedding in codes: the same bytes serve rows and, for tied weights, the output's product."""

    __slots__ = ("_dtype", "_matrix")

    def __init__(self, matrix: CodeMatrix, dtype: torch.dtype) -> None:
        self._matrix, self._dtype = matrix, dtype

    def rows(self, ids: Tensor) -> Tensor:
        return self._matrix.gather(ids, self._dtype)

    def product(self) -> Product:
        """Logits in float32: rounded to bfloat16, the best two would often be equal."""
        return CodeProduct(self._matrix, torch.float32)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._matrix.tensors()


class ByRows:
    """Two forms of one matrix: the one that is faster for few rows, and the one for MANY_ROWS and more. A row's bits
    then depend on how many stand beside it."""

    __slots__ = ("_few", "_many")

    def __init__(self, few: Product, many: Product) -> None:
        self._few, self._many = few, many

    def __call__(self, x: Tensor) -> Tensor:
        return self._for(x)(x)

    def normed(self, x: Tensor, weight: Tensor, eps: float, kernels: Backend) -> Tensor:
        return self._for(x).normed(x, weight, eps, kernels)

    def added(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self._for(x).added(x, residual)

    def gated(self, x: Tensor, activation: str, residual: Tensor | None, kernels: Backend) -> Tensor:
        return self._for(x).gated(x, activation, residual, kernels)

    def codes(self, rows: int) -> CodeMatrix | None:
        return (self._many if rows >= MANY_ROWS else self._few).codes(rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self._few.tensors(), *self._many.tensors())

    @property
    def read_bytes(self) -> int:
        return self._few.read_bytes

    def _for(self, x: Tensor) -> Product:
        return self._many if x.shape[0] >= MANY_ROWS else self._few


@dataclass(frozen=True)
class CodedKind:
    """Weights as codes, activations in bfloat16 between products; sums are exact, so a row's bits depend on nothing
    beside it. for_linear: the form of the layers' matrices; for_table: that of embeddings and of the output's matrix.
    bits, group: of for_linear, where it has to round. for_many: a second form of the layers' matrices, for MANY_ROWS
    rows and more, with codes of 8 bits and a scale each `wide_group` columns: a byte a weight more in memory, where
    there is room for it."""

    name: str
    for_linear: Choice
    for_table: Choice
    bits: int
    group: int | None
    for_many: Choice | None = None
    activations: torch.dtype = torch.bfloat16

    def linear(self, spec: LinearSpec, source: TensorSource, room: WeightRoom | None = None) -> Product:
        if [name for name, _ in spec.parts] == ["lm_head"]:
            return CodeProduct(_matrix(spec, source, self.for_table, room and room.first), torch.float32)
        few = CodeProduct(_matrix(spec, source, self.for_linear, room and room.first))
        if self.for_many is None or (room is not None and not room.grants(wide_bytes(spec.rows, spec.columns))):
            return few
        return ByRows(few, CodeProduct(_matrix(spec, source, self.for_many, room and room.second)))

    def bound(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.for_many is not None and x.shape[0] >= MANY_ROWS:
            return of_codes(x, weight, 8, wide_group(weight.shape[1]))
        return of_codes(x, weight, self.bits, self.group)

    def table(
        self, name: str, shape: tuple[int, int], source: TensorSource, tied: bool, room: WeightRoom | None = None
    ) -> Table:
        held = _held(name, shape, source, self.for_table)
        return CodeTable(code_matrix(held, shape[1], arena=room and room.first), self.activations)


def _matrix(spec: LinearSpec, source: TensorSource, choose: Choice, arena: Arena | None) -> CodeMatrix:
    """The parts one below the other."""
    held = [_held(f"{name}.weight", (rows, spec.columns), source, choose) for name, rows in spec.parts]
    return code_matrix(stack(held), spec.columns, _bias(spec, source), arena)


def _held(name: str, shape: tuple[int, int], source: TensorSource, choose: Choice) -> Codes:
    def numbers() -> Tensor:
        out = torch.empty(shape)
        source.read(name, out)
        return out

    return choose(source.raw(name), numbers)


def _bias(spec: LinearSpec, source: TensorSource) -> Tensor | None:
    if not spec.bias:
        return None
    out, at = torch.empty(spec.rows), 0
    for name, count in spec.parts:
        source.read(f"{name}.bias", out[at : at + count])
        at += count
    return out
