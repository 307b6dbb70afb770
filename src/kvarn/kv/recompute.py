"""`--cache none`: the baseline that keeps nothing. Each step brings every token of its sequences again, and each layer
reads its keys and values from one layer's scratch, which the next layer overwrites."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvarn.core.formats import parse_kv_format
from kvarn.core.ledger import NoRoom
from kvarn.core.options import CachePlan, GroupPlan
from kvarn.core.specs import LayerSpec
from kvarn.kernels.api import Backend, PoolView, StepRows, TableView
from kvarn.kv.governing import check_policy
from kvarn.kv.places import layer_places
from kvarn.kv.policies.base import Decision, KVPolicy
from kvarn.kv.sizing import blocks_for
from kvarn.kv.stats import CacheMemory
from kvarn.kv.step import CacheStep, GroupStep, Span, step_rows

_NOTHING = CacheMemory(0, 0, 0, 0, 0, 0, 0, 0)


class RecomputeCache:
    """Same interface as `CacheManager`; holds no block between steps. scratch_bytes_peak: the largest scratch."""

    def __init__(
        self,
        plan: CachePlan,
        layers: Sequence[LayerSpec],
        backend: Backend,
        *,
        device: torch.device | str = "cpu",
        poison: bool = False,
    ) -> None:
        self.plan, self.backend, self.device, self.poison = plan, backend, torch.device(device), poison
        self.places = layer_places(layers, plan)
        self.scratch_bytes_peak = 0
        self.peak = _NOTHING

    def never_fits(self, total_tokens: int) -> str | None:
        if total_tokens > self.plan.context_tokens:
            return f"{total_tokens} tokens; the context is {self.plan.context_tokens} tokens"
        return None

    def admit(
        self, seq_id: int, token_ids: Sequence[int], namespace: bytes, *, headroom_tokens: int = 0, reuse: bool = True
    ) -> int | NoRoom:
        return 0

    def extend(self, seq_id: int, to_tokens: int) -> NoRoom | None:
        return None

    def fork(self, parent_id: int, child_id: int) -> NoRoom | None:
        return None

    def release(self, seq_id: int) -> None:
        return None

    def settle(self, step: CacheStep) -> None:
        return None

    def assign(self, seq_id: int, policy: KVPolicy | None, prompt_tokens: int) -> None:
        if policy is not None:
            check_policy(policy, self.plan)

    def unassign(self, seq_id: int) -> None:
        return None

    def prefix_roles(self, policy: KVPolicy | None) -> tuple[bool, bool]:
        """(False, False): nothing is looked up, and nothing found."""
        return False, False

    def decide(self, seq_id: int) -> Decision | None:
        return None

    def wants_rereading(self, seq_id: int) -> bool:
        return False

    def apply(self, seq_id: int, decision: Decision) -> bool:
        return False

    def commit_step(self, spans: Sequence[Span], token_ids: Sequence[Sequence[int]]) -> list[int]:
        return []

    def come_to_rest(self, seq_id: int) -> None:
        return None

    def abort_step(self, spans: Sequence[Span]) -> list[int]:
        return []

    def memory(self) -> CacheMemory:
        return _NOTHING

    def prefix_reason(self, seq_id: int) -> str | None:
        """None: nothing is looked up."""
        return None

    def sequence_bytes(self, seq_id: int) -> tuple[int, int]:
        """(0, 0): nothing is kept."""
        return 0, 0

    def bytes_by_format(self, seq_id: int) -> dict[str, int]:
        """Empty: nothing is kept."""
        return {}

    def reset_peak(self) -> None:
        self.scratch_bytes_peak = 0

    def check(self) -> None:
        return None

    def begin_step(self, spans: Sequence[Span]) -> CacheStep:
        """Scratch blocks for whole sequences: every span starts at 0."""
        assert all(s.start == 0 for s in spans), "nothing is cached, so every span starts at token 0"
        counts, query_start, positions = step_rows(spans)
        rows = StepRows(
            torch.from_numpy(query_start.astype(np.int32)),
            torch.from_numpy(positions.astype(np.int32)),
            int(counts.max(initial=0)),
        )
        table, slots, at = self._layout(counts, query_start, positions)
        scratch = [(self._scratch(g, at),) for g in self.plan.groups]
        groups = tuple(GroupStep(self.backend.begin_step(rows, table, p, slots), table, p) for p in scratch)
        held = [t.untyped_storage().nbytes() for g in groups for p in g.pools for t in (*p.k, *p.v)]
        self.scratch_bytes_peak = max(self.scratch_bytes_peak, sum(held))
        return CacheStep(rows, torch.from_numpy(positions), groups, self.places, self.backend)

    def _layout(
        self, counts: np.ndarray, query_start: np.ndarray, positions: np.ndarray
    ) -> tuple[TableView, Tensor, Tensor]:
        """Blocks one after the other, sequence by sequence: (table, slots [T, 1, 1], positions [N, B])."""
        size = self.plan.block_size
        blocks = np.array([blocks_for(int(c), size) for c in counts], dtype=np.int64)
        first = np.concatenate(([0], np.cumsum(blocks)))
        columns = np.arange(int(blocks.max(initial=0)))
        block = (first[:-1, None] + columns[None, :]).astype(np.int32)
        slots = np.repeat(first[:-1] * size - query_start[:-1], counts) + np.arange(query_start[-1])
        at = np.full(int(first[-1]) * size, -1, dtype=np.int32)
        at[slots] = positions
        sequences = torch.arange(len(counts), dtype=torch.int32)
        table = TableView(
            torch.zeros(block.shape, dtype=torch.uint8),
            torch.from_numpy(block),
            torch.from_numpy(blocks.astype(np.int32)),
            sequences,
            layer_stride=0,
            head_stride=0,
        )
        return table, torch.from_numpy(slots).view(-1, 1, 1), torch.from_numpy(at).view(-1, size)

    def _scratch(self, planned: GroupPlan, at: Tensor) -> PoolView:
        """One layer's blocks; the layer axis has stride 0, so all layers of the group share them."""
        fmt, spec, layers = parse_kv_format(planned.pools[0].format), planned.group.spec, len(planned.group.layers)
        size = self.plan.block_size

        def allocate(shape: tuple[int, ...], dtype: str) -> Tensor:
            tensor = torch.empty((len(at), 1, spec.kv_heads, *shape), dtype=getattr(torch, dtype), device=self.device)
            if self.poison:
                tensor.fill_(float("nan"))
            return tensor.expand(-1, layers, *tensor.shape[2:])

        return PoolView(
            fmt,
            size,
            tuple(allocate(t.shape, t.dtype) for t in fmt.k.k_layout(spec.k_dim, size)),
            tuple(allocate(t.shape, t.dtype) for t in fmt.v.v_layout(spec.v_dim, size)),
            at,
        )
