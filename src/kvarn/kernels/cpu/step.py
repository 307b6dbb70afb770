"""One step's operands as the C++ side wants them: built once, then each layer's call carries a few numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.formats import Format
from kvarn.kernels.api import AttendParams, PoolView, Rope, StepRows, TableView
from kvarn.kernels.cpu import _native
from kvarn.kernels.cpu.codes import CODECS, DTYPES

MAX_POOLS = 16


def native_pool(pool: PoolView) -> _native.Pool:
    """The C++ descriptor of a pool. It holds addresses only: the caller keeps the tensors alive."""
    k, v = pool.format.k, pool.format.v
    return _native.Pool(
        codec_of(k),
        0,
        [_part(t) for t in pool.k],
        codec_of(v),
        _group(pool),
        [_part(t) for t in pool.v],
        pool.positions.data_ptr(),
        pool.block_size,
    )


def codec_of(fmt: Format) -> int:
    """Raises IncompatiblePlan for a format that these kernels do not read."""
    if fmt.name not in CODECS:
        raise IncompatiblePlan(
            f"the cpu kernels do not read KV format {fmt.name!r}; they read {', '.join(CODECS)}",
            fixes=("--backend reference", "--kv int8"),
        )
    return CODECS[fmt.name]


def dims_of(pool: PoolView) -> tuple[int, int, int]:
    """KV heads, key dim, value dim."""
    return pool.k[0].shape[2], pool.k[0].shape[3], pool.format.v.elements(pool.v[0].shape[4])


def _group(pool: PoolView) -> int:
    """Channels of V that share one scale and zero point; 0 where a format has no such groups."""
    return dims_of(pool)[2] // pool.v[1].shape[-1] if len(pool.v) == 3 else 0


def _part(tensor: Tensor) -> tuple[int, int, int, int]:
    size = tensor.element_size()
    block, layer, head = (s * size for s in tensor.stride()[:3])
    return tensor.data_ptr(), block, layer, head


def dtype_of(x: Tensor) -> int:
    """Raises IncompatiblePlan for an element type that these kernels do not take."""
    if x.dtype not in DTYPES:
        raise IncompatiblePlan(
            f"activations are {x.dtype}; the cpu kernels take float32, bfloat16 and float16",
            fixes=("--backend reference",),
        )
    return DTYPES[x.dtype]


def packed_heads(x: Tensor) -> Tensor:
    """x [T, heads, D] itself if the heads of a token stand side by side, else a copy where they do."""
    return x if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1) else x.contiguous()


class CpuStep:
    """See `kvarn.kernels.api.StepKernel`; the other methods are the backend's of the same names."""

    __slots__ = ("_keep", "_native", "_tokens", "_v_dim")

    def __init__(
        self,
        isa: str,
        threads: int,
        rows: StepRows,
        table: TableView,
        pools: Sequence[PoolView],
        dims: tuple[int, int, int],
        slots: Tensor | None,
        open_pool: int = 0,
    ) -> None:
        """dims: KV heads, key dim, value dim. slots as in `Backend.write`; None: this step only reads."""
        if len(pools) > MAX_POOLS:
            raise IncompatiblePlan(f"{len(pools)} pools in one cache group; the cpu kernels take {MAX_POOLS}")
        natives = [native_pool(p) for p in pools]
        self._tokens, self._v_dim = rows.positions.shape[0], dims[2]
        self._keep = (rows, table, tuple(pools), slots, natives)
        step = self._native = _native.Step(isa, natives, *dims, threads)
        step.set_table(
            table.pool.data_ptr(),
            table.block.data_ptr(),
            table.length.data_ptr(),
            table.first_row.data_ptr(),
            table.block.shape[0],
            table.block.shape[1],
            table.layer_stride,
            table.head_stride,
        )
        step.set_rows(
            rows.query_start.data_ptr(), rows.positions.data_ptr(), rows.query_start.shape[0] - 1, self._tokens
        )
        if slots is not None:
            token, layer, head = (slots.stride(i) if slots.shape[i] > 1 else 0 for i in range(3))
            step.set_slots(slots.data_ptr(), token, layer, head, open_pool)

    @property
    def address(self) -> int:
        """Where its operands stand on the C++ side."""
        return self._native.address()

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
        q = packed_heads(q)
        out = torch.empty((q.shape[0], q.shape[1], self._v_dim), dtype=q.dtype)
        if k is not None and v is not None:
            k, v = packed_heads(k), packed_heads(v)
            k_at, k_token, v_at, v_token = k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        else:
            k_at = k_token = v_at = v_token = 0
        cos, sin, half = (0, 0, 0) if rope is None else (rope.cos.data_ptr(), rope.sin.data_ptr(), rope.cos.shape[1])
        self._native.append_and_attend(
            layer,
            q.data_ptr(),
            q.stride(0),
            k_at,
            k_token,
            v_at,
            v_token,
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            dtype_of(q),
            q.shape[1],
            cos,
            sin,
            half,
            params.scale,
            params.window_tokens or 0,
            params.chunk_tokens or 0,
            params.soft_cap or 0.0,
            0 if params.sinks is None else params.sinks.data_ptr(),
        )
        return out

    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        """Write k and v, already rotated, into the step's slots."""
        k, v = packed_heads(k), packed_heads(v)
        self._native.write(layer, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), dtype_of(k))

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        x = packed_heads(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        half = rope.cos.shape[1]
        self._native.rope(
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            dtype_of(x),
            x.shape[1],
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            half,
        )
        return out

    def add_mass(self, q: Tensor, lse: Tensor, layer: int, params: AttendParams, mass: Tensor) -> None:
        q = packed_heads(q)
        self._native.mass(
            layer,
            q.data_ptr(),
            q.stride(0),
            lse.data_ptr(),
            mass.data_ptr(),
            dtype_of(q),
            q.shape[1],
            params.scale,
            params.window_tokens or 0,
            params.chunk_tokens or 0,
            params.soft_cap or 0.0,
        )
