"""The gated feed-forward block (GLU variants, Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor

from kvarn.kernels.api import Backend
from kvarn.models.weights.base import Product


class GatedMLP:
    """down(activation(gate(x)) * up(x)); gate_up is one product, hidden -> (gate, then up)."""

    __slots__ = ("_activation", "_down", "_gate_up")

    def __init__(self, gate_up: Product, down: Product, activation: str) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation

    def __call__(self, x: Tensor, kernels: Backend) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(kernels.gated(gate, up, self._activation))
