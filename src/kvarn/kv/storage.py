"""The tensors of the pools: allocated once from the plan, in the layout that the formats declare.

In memory a layer's blocks stand side by side, layer behind layer: attention goes through one layer at a time, and
blocks that a sequence took one after the other are then one piece to read (ADR 0014).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvarn.core.formats import TensorLayout, parse_kv_format
from kvarn.core.options import GroupPlan, PoolPlan
from kvarn.kernels._pages import ask_for_large_pages
from kvarn.kernels.api import PoolView
from kvarn.kv.pool import BlockPool


class PoolStorage:
    """One pool's tensors, [n_blocks, layers, heads, *layout]; `view` is what the kernels get."""

    def __init__(self, planned: GroupPlan, plan: PoolPlan, ledger: BlockPool, device: torch.device) -> None:
        fmt, spec = parse_kv_format(plan.format), planned.group.spec
        layers, heads = len(planned.group.layers), spec.kv_heads
        held = (plan.n_blocks, layers if planned.grain == "group" else 1, 1 if planned.grain == "head" else heads)
        self._held: list[Tensor] = []

        def allocate(layouts: tuple[TensorLayout, ...]) -> tuple[Tensor, ...]:
            return tuple(self._allocate(held, layers, heads, t, device) for t in layouts)

        self.view = PoolView(
            format=fmt,
            block_size=ledger.block_size,
            k=allocate(fmt.k.k_layout(spec.k_dim, ledger.block_size)),
            v=allocate(fmt.v.v_layout(spec.v_dim, ledger.block_size)),
            positions=torch.from_numpy(ledger.positions),
        )

    def _allocate(
        self, held: tuple[int, int, int], layers: int, heads: int, layout: TensorLayout, device: torch.device
    ) -> Tensor:
        """One tensor [N, 1 or L, 1 or H, *shape], seen as [N, L, H, *shape] with stride 0 where a block has no axis."""
        blocks, held_layers, held_heads = held
        shape = (held_layers, blocks, held_heads, *layout.shape)
        tensor = torch.empty(shape, dtype=getattr(torch, layout.dtype), device=device).transpose(0, 1)
        ask_for_large_pages(tensor)
        self._held.append(tensor)
        return tensor.expand(held[0], layers, heads, *layout.shape)

    def tensors(self) -> tuple[Tensor, ...]:
        """What is held, without the axes that are only seen."""
        return tuple(self._held)

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors())

    def poison(self, blocks: list[int] | None = None) -> None:
        """Fill blocks (None: all) with NaN, or with the integer types' extreme, so that reading a free slot shows."""
        for tensor in self.tensors():
            value = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
            tensor[slice(None) if blocks is None else blocks] = value

    def poison_slots(self, slots: Tensor) -> None:
        """Fill single slots (block * block_size + slot) of an open float pool with NaN."""
        k, v = self._held
        block, slot = slots // self.view.block_size, slots % self.view.block_size
        k[block, ..., slot] = float("nan")
        v[block, :, :, slot] = float("nan")
