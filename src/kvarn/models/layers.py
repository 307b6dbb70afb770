"""Decoder layers: where the norms stand."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvarn.kernels.api import Backend, LayerProgram, Rope
from kvarn.kv.view import LayerKV
from kvarn.models.attention import Attention
from kvarn.models.mlp import GatedMLP


class DecoderLayer(Protocol):
    def __call__(self, x: Tensor, kernels: Backend, kv: LayerKV, rope: Rope) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        ...

    def program(self, rows: int) -> LayerProgram | None:
        """What it computes for so many rows, as data for backends that run whole layers; None where it cannot be said
        so."""
        ...


class PreNormLayer:
    """Norms before attention and MLP, both added to the residual stream (Llama and most others)."""

    __slots__ = ("_attention", "_attention_norm", "_eps", "_mlp", "_mlp_norm")

    def __init__(
        self, attention: Attention, mlp: GatedMLP, attention_norm: Tensor, mlp_norm: Tensor, eps: float
    ) -> None:
        self._attention, self._mlp = attention, mlp
        self._attention_norm, self._mlp_norm, self._eps = attention_norm, mlp_norm, eps

    def __call__(self, x: Tensor, kernels: Backend, kv: LayerKV, rope: Rope) -> Tensor:
        x = self._attention(x, self._attention_norm, self._eps, x, kernels, kv, rope)
        return self._mlp(x, self._mlp_norm, self._eps, x, kernels)

    def program(self, rows: int) -> LayerProgram | None:
        norms = self._attention_norm, None, self._mlp_norm, None
        return _program(self._attention, self._mlp, norms, self._eps, rows)


class SandwichLayer:
    """Norms before and after attention and MLP (Gemma 2 and 3). norms [4]: before attention, after it, before the MLP,
    after it."""

    __slots__ = ("_attention", "_eps", "_mlp", "_norms")

    def __init__(
        self, attention: Attention, mlp: GatedMLP, norms: tuple[Tensor, Tensor, Tensor, Tensor], eps: float
    ) -> None:
        self._attention, self._mlp, self._norms, self._eps = attention, mlp, norms, eps

    def __call__(self, x: Tensor, kernels: Backend, kv: LayerKV, rope: Rope) -> Tensor:
        before_attention, after_attention, before_mlp, after_mlp = self._norms
        mixed = self._attention(x, before_attention, self._eps, None, kernels, kv, rope)
        x = x + kernels.rms_norm(mixed, after_attention, self._eps)
        fed = self._mlp(x, before_mlp, self._eps, None, kernels)
        return x + kernels.rms_norm(fed, after_mlp, self._eps)

    def program(self, rows: int) -> LayerProgram | None:
        return _program(self._attention, self._mlp, self._norms, self._eps, rows)


def _program(
    attention: Attention,
    mlp: GatedMLP,
    norms: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    eps: float,
    rows: int,
) -> LayerProgram | None:
    mixing, feeding = attention.program(rows), mlp.program(rows)
    if mixing is None or feeding is None:
        return None
    before_attention, after_attention, before_mlp, after_mlp = norms
    return LayerProgram(
        before_attention=before_attention,
        after_attention=after_attention,
        before_mlp=before_mlp,
        after_mlp=after_mlp,
        eps=eps,
        **mixing._asdict(),
        **feeding._asdict(),
    )
