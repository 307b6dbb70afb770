"""The cpu backend: one method an operation, each handing addresses to the C++ side (`csrc/`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvarn.core.errors import IncompatiblePlan, UnknownName
from kvarn.kernels.api import Attended, AttendParams, LayerProgram, PoolView, Rope, StepRows, TableView
from kvarn.kernels.cpu import _native
from kvarn.kernels.cpu.codes import ACTIVATIONS
from kvarn.kernels.cpu.decoder import CpuDecoder, runs_whole
from kvarn.kernels.cpu.step import CpuStep, dims_of, dtype_of, native_pool
from kvarn.kernels.cpu.team import shared_team

_NO_ROWS = StepRows(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), 0)
_NO_TABLE = TableView(
    torch.zeros((1, 1), dtype=torch.uint8),
    torch.zeros((1, 1), dtype=torch.int32),
    torch.zeros(1, dtype=torch.int32),
    torch.zeros(1, dtype=torch.int32),
    0,
    0,
)


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets that are built in and that this machine runs, best first."""
    return tuple(_native.instruction_sets())


class CpuBackend:
    """See `kvarn.kernels.api.Backend`. isa: an instruction set of `instruction_sets()`, None for the best."""

    name = "cpu"

    def __init__(self, isa: str | None = None) -> None:
        known = instruction_sets()
        if isa is not None and isa not in known:
            raise UnknownName("instruction set", isa, known)
        self.isa = isa or known[0]
        self._small = _native.Small(self.isa)
        _native.use_team(shared_team() or 0)

    @staticmethod
    def describe() -> str:
        """What it runs on, in words."""
        known = instruction_sets()
        others = f" (also built: {', '.join(known[1:])})" if known[1:] else ""
        return f"native, instruction set {known[0]}{others}"

    @property
    def threads(self) -> int:
        """Threads that an operation may use: PyTorch's figure."""
        return torch.get_num_threads()

    def begin_step(
        self, rows: StepRows, table: TableView, pools: Sequence[PoolView], slots: Tensor | None = None
    ) -> CpuStep:
        return CpuStep(self.isa, self.threads, rows, table, pools, dims_of(pools[0]), slots)

    def decoder(self, layers: Sequence[LayerProgram], norm: Tensor, eps: float) -> CpuDecoder | None:
        return CpuDecoder(self.isa, layers, norm, eps) if layers and runs_whole(layers) else None

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        rows = StepRows(_NO_ROWS.query_start, x.new_zeros(x.shape[0], dtype=torch.int32), 0)
        return CpuStep(self.isa, self.threads, rows, _NO_TABLE, (), (1, x.shape[2], x.shape[2]), None).rope(x, rope)

    def write(self, k: Tensor, v: Tensor, slots: Tensor, pool: PoolView, layer: int) -> None:
        rows = StepRows(_NO_ROWS.query_start, k.new_zeros(k.shape[0], dtype=torch.int32), 0)
        dims = k.shape[1], k.shape[2], v.shape[2]
        CpuStep(self.isa, self.threads, rows, _NO_TABLE, (pool,), dims, slots).write(k, v, layer)

    def attend(
        self, q: Tensor, rows: StepRows, table: TableView, pools: Sequence[PoolView], layer: int, params: AttendParams
    ) -> Attended:
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        step = self.begin_step(rows, table, pools)
        return Attended(step.append_and_attend(q, None, None, None, layer, params, lse), lse)

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
        self.begin_step(rows, table, pools).add_mass(q, lse, layer, params, mass)

    def seal(self, source: PoolView, source_blocks: Tensor, target: PoolView, target_blocks: Tensor) -> None:
        layers, heads = _axes(source)
        _, k_dim, v_dim = dims_of(source)
        _native.seal(
            self.isa,
            native_pool(source),
            source_blocks.data_ptr(),
            native_pool(target),
            target_blocks.data_ptr(),
            source_blocks.shape[0],
            layers,
            heads,
            k_dim,
            v_dim,
            self.threads,
        )

    def decode(self, pool: PoolView, blocks: Tensor) -> tuple[Tensor, Tensor]:
        _, k_dim, v_dim = dims_of(pool)
        shape, size = (blocks.shape[0], *pool.k[0].shape[1:3]), pool.block_size
        k, v = torch.empty((*shape, k_dim, size)), torch.empty((*shape, size, v_dim))
        _native.decode(
            self.isa,
            native_pool(pool),
            blocks.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            blocks.shape[0],
            pool.k[0].shape[1],
            pool.k[0].shape[2],
            k_dim,
            v_dim,
            self.threads,
        )
        return k, v

    def copy_blocks(self, pool: PoolView, source: Tensor, target: Tensor) -> None:
        for stored in map(_held, (*pool.k, *pool.v)):
            stored[target] = stored[source]

    def move_slots(self, pool: PoolView, source: Tensor, target: Tensor) -> None:
        _, k_dim, v_dim = dims_of(pool)
        size = pool.block_size
        layouts = (*pool.format.k.k_layout(k_dim, size), *pool.format.v.v_layout(v_dim, size))
        for stored, layout in zip((*pool.k, *pool.v), layouts, strict=True):
            if layout.token_axis is None:
                raise IncompatiblePlan(f"single tokens of a {pool.format.name} block cannot be rewritten")
            by_slot = _held(stored).movedim(3 + layout.token_axis, 1)
            by_slot[target // size, target % size] = by_slot[source // size, source % size]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._norm(rows, None, weight, eps, out, None)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
        self._norm(_rows(x), _rows(residual), weight, eps, out, total)
        return out, total

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, total: Tensor | None
    ) -> None:
        self._small.rms_norm(
            x.data_ptr(),
            x.stride(0),
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            0 if total is None else total.data_ptr(),
            x.shape[0],
            x.shape[1],
            dtype_of(x),
            dtype_of(weight),
            eps,
            self.threads,
        )

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        if activation not in ACTIVATIONS:
            raise UnknownName("gated activation", activation, ACTIVATIONS)
        out = torch.empty(gate.shape, dtype=gate.dtype)
        gate, up = _rows(gate), _rows(up)
        self._small.gated(
            gate.data_ptr(),
            gate.stride(0),
            up.data_ptr(),
            up.stride(0),
            out.data_ptr(),
            gate.shape[0],
            gate.shape[1],
            dtype_of(gate),
            ACTIVATIONS[activation],
            self.threads,
        )
        return out


def _held(tensor: Tensor) -> Tensor:
    """A pool's tensor without repeats: axes of stride 0 cut to their one element."""
    for axis in (1, 2):
        if tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _axes(pool: PoolView) -> tuple[int, int]:
    """Layers and heads that a pool really stores: 1 where the stride is 0."""
    layer, head = pool.k[0].stride()[1:3]
    return (pool.k[0].shape[1] if layer else 1), (pool.k[0].shape[2] if head else 1)


def _rows(x: Tensor) -> Tensor:
    """x [..., n] as rows [R, n] with the last axis packed; copies only where the strides do not allow a view."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()
