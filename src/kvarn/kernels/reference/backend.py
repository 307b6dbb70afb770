"""The reference backend: one method an operation, each a few lines over the files beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.core.errors import IncompatiblePlan
from kvarn.kernels.api import Attended, AttendParams, LayerProgram, PoolView, Rope, StepRows, TableView
from kvarn.kernels.reference.attend import attend, value_dim
from kvarn.kernels.reference.codecs import decode, encode
from kvarn.kernels.reference.mass import add_mass


def held(tensor: Tensor) -> Tensor:
    """A pool's tensor [N, L, H, ...] without the layer and head axes that are only seen (stride 0): size 1 there."""
    for axis in (1, 2):
        if tensor.shape[axis] > 1 and tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """See `kvarn.kernels.api.StepKernel`: the operations one after the other."""

    backend: ReferenceBackend
    rows: StepRows
    table: TableView
    pools: Sequence[PoolView]
    slots: Tensor | None

    def append_and_attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: Rope | None,
        layer: int,
        params: AttendParams,
        lse: Tensor | None = None,
    ) -> Tensor:
        if rope is not None:
            q = self.backend.rope(q, rope)
            k = None if k is None else self.backend.rope(k, rope)
        if k is not None and v is not None and self.slots is not None:
            self.backend.write(k, v, self.slots, self.pools[0], layer)
        attended = self.backend.attend(q, self.rows, self.table, self.pools, layer, params)
        if lse is not None:
            lse.copy_(attended.lse)
        return attended.out

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        return self.backend.rope(x, rope)

    def add_mass(self, q: Tensor, lse: Tensor, layer: int, params: AttendParams, mass: Tensor) -> None:
        self.backend.add_mass(q, lse, self.rows, self.table, self.pools, layer, params, mass)


class ReferenceBackend:
    """See `kvarn.kernels.api.Backend`."""

    name = "reference"

    @staticmethod
    def describe() -> str:
        """What it runs on, in words."""
        return "PyTorch operations, any device: the specification, slow"

    def begin_step(
        self, rows: StepRows, table: TableView, pools: Sequence[PoolView], slots: Tensor | None = None
    ) -> ReferenceStep:
        return ReferenceStep(self, rows, table, pools, slots)

    def decoder(self, layers: Sequence[LayerProgram], norm: Tensor, eps: float) -> None:
        return None

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

    def add_mass(
        self,
        q: Tensor,
        lse: Tensor,
        rows: StepRows,
        table: TableView,
        pools: Sequence[PoolView],
        layer: int,
        params: AttendParams,
        mass: Tensor,
    ) -> None:
        add_mass(q, lse, rows, table, pools, layer, params, mass)

    def move_slots(self, pool: PoolView, source: Tensor, target: Tensor) -> None:
        size, dims = pool.block_size, (pool.k[0].shape[-2], value_dim(pool))
        layouts = (*pool.format.k.k_layout(dims[0], size), *pool.format.v.v_layout(dims[1], size))
        for tensor, layout in zip((*pool.k, *pool.v), layouts, strict=True):
            if layout.token_axis is None:
                raise IncompatiblePlan(f"single tokens of a {pool.format.name} block cannot be rewritten")
            by_slot = held(tensor).movedim(3 + layout.token_axis, 1)
            by_slot[target // size, target % size] = by_slot[source // size, source % size]

    def seal(self, source: PoolView, source_blocks: Tensor, target: PoolView, target_blocks: Tensor) -> None:
        filled = (source.positions[source_blocks] >= 0)[:, None, None]
        sides = (
            (source.format.k, source.k, target.format.k, target.k),
            (source.format.v, source.v, target.format.v, target.v),
        )
        for in_row, (have, taken, want, stored) in zip((True, False), sides, strict=True):
            parts = tuple(held(t)[source_blocks] for t in taken)
            wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
            x = decode(have, parts, wide, tokens_in_row=in_row)
            for tensor, made in zip(stored, encode(want, x, filled, tokens_in_row=in_row), strict=True):
                held(tensor)[target_blocks] = made

    def decode(self, pool: PoolView, blocks: Tensor) -> tuple[Tensor, Tensor]:
        k = decode(pool.format.k, [t[blocks] for t in pool.k], torch.float32, tokens_in_row=True)
        v = decode(pool.format.v, [t[blocks] for t in pool.v], torch.float32, tokens_in_row=False)
        return k.transpose(-1, -2).contiguous(), v

    def copy_blocks(self, pool: PoolView, source: Tensor, target: Tensor) -> None:
        for stored in (*pool.k, *pool.v):
            held(stored)[target] = held(stored)[source]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (scaled * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        if activation == "silu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh") * up
