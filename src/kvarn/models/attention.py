"""Attention as a layer sees it: project, hand to the cache, project back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.kernels.api import AttendParams, Backend, CodeMatrix, Rope
from kvarn.kv.view import LayerKV
from kvarn.models.weights.base import Product


class AttentionProgram(NamedTuple):
    """The attention half of a `kvarn.kernels.api.LayerProgram`."""

    qkv: CodeMatrix
    out: CodeMatrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    head_eps: float
    query_heads: int
    kv_heads: int
    params: AttendParams


class Attention:
    """Grouped-query attention over the layer's own cache; query, key and value come from one product.

    qkv: hidden -> (query heads, then key heads, then value heads) * head dim. q_norm, k_norm [head dim]: an RMS norm of
    each head before the rotation (Qwen 3, Gemma 3). A layer that uses another's cache makes queries only.
    """

    __slots__ = ("_eps", "_heads", "_k_norm", "_out", "_params", "_q_norm", "_qkv", "_split")

    def __init__(
        self,
        spec: LayerSpec,
        qkv: Product,
        out: Product,
        params: AttendParams,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        kv_heads = 0 if spec.kind is LayerKind.SHARED else spec.kv_heads
        self._split = (spec.query_heads, kv_heads, kv_heads)
        self._heads = sum(self._split)
        self._qkv, self._out, self._params = qkv, out, params
        self._q_norm, self._k_norm, self._eps = q_norm, k_norm, eps

    def __call__(
        self, x: Tensor, norm: Tensor, eps: float, residual: Tensor | None, kernels: Backend, kv: LayerKV, rope: Rope
    ) -> Tensor:
        """residual + attention over rms_norm(x, norm); x, residual [T, hidden] -> [T, hidden]."""
        heads = self._qkv.normed(x, norm, eps, kernels).view(x.shape[0], self._heads, -1)
        q, k, v = heads.split_with_sizes(self._split, 1)
        if self._q_norm is not None:
            q = kernels.rms_norm(q, self._q_norm, self._eps)
        if self._k_norm is not None and self._split[1]:
            k = kernels.rms_norm(k, self._k_norm, self._eps)
        own = (k, v) if self._split[1] else (None, None)
        mixed = kv.append_and_attend(q, *own, rope, self._params)
        return self._out.added(mixed.view(x.shape[0], -1), residual)

    def program(self, rows: int) -> AttentionProgram | None:
        """What it computes for so many rows, as data; None where its products are not codes."""
        qkv, out = self._qkv.codes(rows), self._out.codes(rows)
        if qkv is None or out is None:
            return None
        queries, keys, _ = self._split
        return AttentionProgram(qkv, out, self._q_norm, self._k_norm, self._eps, queries, keys, self._params)
