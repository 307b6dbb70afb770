"""Products with matrices of codes: the specification, in torch. What multiplies offsets is rounded to bfloat16, as
AVX-512 does; on AVX2 it is not, which is nearer to the numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.kernels.api import Codes

_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


class Matrix:
    """See `kvarn.kernels.api.CodeMatrix`. Holds the numbers in float32."""

    def __init__(self, held: Codes, width: int, bias: Tensor | None = None) -> None:
        self._numbers, self._span = replace(held, offset=None).floats(), held.span
        self._offset = None if held.offset is None else held.offset.float()
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
        codes, scale = rounded(x, self._span)
        out = F.linear((codes * scale).flatten(1), self._numbers, self._bias)
        if self._offset is not None:
            sums = codes.unflatten(2, (-1, x.shape[1] // self._offset.shape[1])).sum(-1).bfloat16().float()
            out = out + F.linear((sums * scale).flatten(1), self._offset)
        return (out if residual is None else out + residual.float()).to(dtype)

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        numbers = self._numbers[ids]
        if self._offset is not None:
            numbers = numbers + self._offset[ids].repeat_interleave(numbers.shape[1] // self._offset.shape[1], dim=1)
        return numbers[:, : self.width].to(dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self._numbers, self._offset, self._bias) if t is not None)


def rounded(x: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """x [T, K] float as int8 holds it: codes [T, K / span, span] in x's dtype and scales [T, K / span, 1], the largest
    magnitude of each `span` columns becoming 127."""
    parts = x.unflatten(1, (-1, span))
    scale = parts.abs().amax(-1, keepdim=True) / 127
    return torch.round(parts / scale.clamp_min(torch.finfo(torch.float32).tiny)), scale
