"""Weight kinds that multiply codes: which form a tensor takes, and the products a layer calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.kernels import code_matrix
from kvarn.kernels.api import Backend, CodeMatrix, Codes
from kvarn.models.weights._codes import stack
from kvarn.models.weights.base import LinearSpec, Product, RawBlocks, Table, TensorSource

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

    def tensors(self) -> tuple[Tensor, ...]:
        return self._matrix.tensors()


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


@dataclass(frozen=True)
class CodedKind:
    """Weights as codes, activations in bfloat16 between products. for_linear: the form of the layers' matrices;
    for_table: that of embeddings and of the output's matrix."""

    name: str
    for_linear: Choice
    for_table: Choice
    activations: torch.dtype = torch.bfloat16

    def linear(self, spec: LinearSpec, source: TensorSource) -> Product:
        is_head = [name for name, _ in spec.parts] == ["lm_head"]
        choose = self.for_table if is_head else self.for_linear
        held = [_held(f"{name}.weight", (rows, spec.columns), source, choose) for name, rows in spec.parts]
        matrix = code_matrix(stack(held), spec.columns, _bias(spec, source))
        return CodeProduct(matrix, torch.float32 if is_head else None)

    def table(self, name: str, shape: tuple[int, int], source: TensorSource, tied: bool) -> Table:
        return CodeTable(code_matrix(_held(name, shape, source, self.for_table), shape[1]), self.activations)


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
