"""Float weights in one dtype: PyTorch's own matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.models.weights.base import LinearSpec, Product, Table, TensorSource, read_rows


class DenseProduct:
    """x @ weight.T + bias, weight [rows, columns]."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class DenseTable:
    """An embedding [rows, columns]."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    def product(self) -> Product:
        return DenseProduct(self.weight)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,)


@dataclass(frozen=True)
class DenseKind:
    """Weights and activations in one float dtype."""

    name: str
    activations: torch.dtype

    def linear(self, spec: LinearSpec, source: TensorSource) -> Product:
        return DenseProduct(*read_rows(spec, source, self.activations))

    def table(self, name: str, shape: tuple[int, int], source: TensorSource) -> Table:
        weight = torch.empty(shape, dtype=self.activations)
        source.read(name, weight)
        return DenseTable(weight)
