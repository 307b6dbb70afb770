"""Products with matrices of codes: the specification, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.kernels.api import Codes

_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


class Matrix:
    """See `kvarn.kernels.api.CodeMatrix`. Holds the numbers in float32."""

    def __init__(self, held: Codes, width: int, bias: Tensor | None = None) -> None:
        self._numbers, self._group = held.floats(), held.group
        self._bias = None if bias is None else bias.float()
        self.rows, self.width = held.codes.shape[0], width

    def product(self, x: Tensor, dtype: torch.dtype | None = None, residual: Tensor | None = None) -> Tensor:
        return self._run(x.float(), dtype or x.dtype, residual)

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return self._run(wide * factor * weight, x.dtype, None)

    def gated(self, x: Tensor, activation: str, residual: Tensor | None = None) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return self._run(_ACTIVATIONS[activation](gate) * up, x.dtype, residual)

    def _run(self, x: Tensor, dtype: torch.dtype, residual: Tensor | None) -> Tensor:
        x = F.pad(x, (0, self._numbers.shape[1] - self.width))
        out = F.linear(rounded(x, self._group), self._numbers, self._bias)
        return (out if residual is None else out + residual.float()).to(dtype)

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self._numbers[ids, : self.width].to(dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._numbers,) if self._bias is None else (self._numbers, self._bias)


def rounded(x: Tensor, group: int) -> Tensor:
    """x [T, K] float as int8 holds it: one scale a row and `group` columns, the largest magnitude becoming 127."""
    parts = x.unflatten(1, (-1, group))
    scale = parts.abs().amax(-1, keepdim=True) / 127
    return (torch.round(parts / scale.clamp_min(torch.finfo(torch.float32).tiny)) * scale).flatten(1)
