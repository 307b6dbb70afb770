"""The reference backend: one method an operation, each a few lines over the files beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.kernels.api import Attended, AttendParams, PoolView, Rope, StepRows, TableView
from kvarn.kernels.reference.attend import attend


def held(tensor: Tensor) -> Tensor:
    """A pool's tensor [N, L, H, ...] without the layer and head axes that are only seen (stride 0): size 1 there."""
    for axis in (1, 2):
        if tensor.shape[axis] > 1 and tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


class ReferenceBackend:
    """See `kvarn.kernels.api.Backend`."""

    name = "reference"

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        half = rope.cos.shape[-1]
        cos, sin = rope.cos[:, None, :].to(torch.float32), rope.sin[:, None, :].to(torch.float32)
        x1, x2 = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
        return torch.cat((turned, x[..., 2 * half :]), dim=-1)

    def write(self, k: Tensor, v: Tensor, slots: Tensor, pool: PoolView, layer: int) -> None:
        k_store, v_store = held(pool.k[0]), held(pool.v[0])
        tokens, heads = k.shape[:2]
        at = slots[:, min(layer, slots.shape[1] - 1), :].expand(tokens, heads)
        token, head = torch.nonzero(at >= 0, as_tuple=True)
        block, slot = at[token, head] // pool.block_size, at[token, head] % pool.block_size
        layer = min(layer, k_store.shape[1] - 1)
        head_at = head.clamp_max(k_store.shape[2] - 1)
        k_store[block, layer, head_at, :, slot] = k[token, head].to(k_store.dtype)
        v_store[block, layer, head_at, slot, :] = v[token, head].to(v_store.dtype)

    def attend(
        self, q: Tensor, rows: StepRows, table: TableView, pools: Sequence[PoolView], layer: int, params: AttendParams
    ) -> Attended:
        return attend(q, rows, table, pools, layer, params)

    def seal(self, source: PoolView, source_blocks: Tensor, target: PoolView, target_blocks: Tensor) -> None:
        for stored, taken in zip((*target.k, *target.v), (*source.k, *source.v), strict=True):
            held(stored)[target_blocks] = held(taken)[source_blocks].to(stored.dtype)

    def decode(self, pool: PoolView, blocks: Tensor) -> tuple[Tensor, Tensor]:
        (k,), (v,) = pool.k, pool.v
        return k[blocks].float(), v[blocks].float()

    def copy_blocks(self, pool: PoolView, source: Tensor, target: Tensor) -> None:
        for stored in (*pool.k, *pool.v):
            held(stored)[target] = held(stored)[source]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (scaled * weight.float()).to(x.dtype)

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        if activation == "silu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh") * up
