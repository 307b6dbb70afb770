"""The gated feed-forward block (GLU variants, Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvarn.kernels.api import Backend, CodeMatrix
from kvarn.models.weights.base import Product


class MLPProgram(NamedTuple):
    """The feed-forward half of a `kvarn.kernels.api.LayerProgram`."""

    gate_up: CodeMatrix
    down: CodeMatrix
    activation: str


class GatedMLP:
    """down(activation(gate(x)) * up(x)); gate_up is one product, hidden -> (gate, then up)."""

    __slots__ = ("_activation", "_down", "_gate_up")

    def __init__(self, gate_up: Product, down: Product, activation: str) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation

    def __call__(self, x: Tensor, norm: Tensor, eps: float, residual: Tensor | None, kernels: Backend) -> Tensor:
        """residual + the block over rms_norm(x, norm); x, residual [T, hidden] -> [T, hidden]."""
        gate_up = self._gate_up.normed(x, norm, eps, kernels)
        return self._down.gated(gate_up, self._activation, residual, kernels)

    def program(self, rows: int) -> MLPProgram | None:
        """What it computes for so many rows, as data; None where its products are not codes."""
        gate_up, down = self._gate_up.codes(rows), self._down.codes(rows)
        return None if gate_up is None or down is None else MLPProgram(gate_up, down, self._activation)
