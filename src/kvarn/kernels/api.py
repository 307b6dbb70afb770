"""The operations of a backend, their operands, and the only argument checks.

Shape letters: T tokens of the step, S sequences of the step, R table rows, C table columns, N blocks of a pool,
L layers of a group, H KV heads, G query heads a KV head (Hq = H * G), D key dim, E value dim, B block size.

A step is ragged: sequence s owns the token rows query_start[s] .. query_start[s + 1], any mix of prefill chunks and
single decode rows. Every slot of a pool has a logical position (-1: holds nothing). Which keys a query at position p
attends is decided by positions alone: 0 <= position <= p, and position > p - window where the layer has a window.
So blocks may come in any order and have holes, and causality needs no other mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvarn.core.formats import KVFormat


@dataclass(frozen=True, slots=True)
class PoolView:
    """One format's storage of one cache group.

    k, v: the format's tensors in the order of its k_layout and v_layout, each [N, L, H, *layout shape]; where the
    group's grain has no layer or head axis the stride there is 0. positions [N, B] int32: logical position, or -1.
    """

    format: KVFormat
    block_size: int
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    positions: Tensor


@dataclass(frozen=True, slots=True)
class TableView:
    """Block tables of the group's sequences. pool [R, C] uint8: index into the pools; block [R, C] int32; length [R]
    int32: entries in use. first_row [S] int32: the row of sequence s for layer 0 and head 0; layer l and head h
    stand at first_row[s] + l * layer_stride + h * head_stride (strides 0 where the grain has no such axis)."""

    pool: Tensor
    block: Tensor
    length: Tensor
    first_row: Tensor
    layer_stride: int
    head_stride: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """query_start [S + 1] int32, positions [T] int32 (logical). max_queries: the longest sequence span of the step."""

    query_start: Tensor
    positions: Tensor
    max_queries: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of this step's tokens: cos, sin [T, R/2] float32 with any attention scaling folded in. Rotates the first
    R channels as halves: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), x1 = x[:R/2], x2 = x[R/2:R]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class AttendParams:
    """scale multiplies q.k; soft_cap c: c * tanh(score / c); window_tokens as in LayerSpec; chunk_tokens: keys with
    position // chunk == p // chunk. sinks [Hq]: a learned logit a head joins the softmax's denominator (gpt-oss)."""

    scale: float
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Attended:
    """out [T, Hq, E] in q's dtype; lse [T, Hq] float32, the log-sum-exp of the scaled scores (-inf: no key seen)."""

    out: Tensor
    lse: Tensor


SHORT_GROUP = 32  # columns of the smallest group of codes


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix of small codes: weight = scale * (code - zero) + offset. codes [N, K] uint8, below 2**bits (4 or 8),
    zero being the one in the middle; scale [N, K / group] float16; offset the same in bfloat16, or None where all are
    0. group: columns that share a scale, a multiple of 32."""

    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    bits: int

    @property
    def zero(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def span(self) -> int:
        """Columns whose activations share a scale: see `span_columns`."""
        return span_columns(self.codes.shape[1], self.group)

    def floats(self) -> Tensor:
        """The numbers [N, K] in float32."""
        codes = self.codes.float().unflatten(1, (self.scale.shape[1], -1))
        numbers = (codes - self.zero) * self.scale.float().unsqueeze(-1)
        return (numbers if self.offset is None else numbers + self.offset.float().unsqueeze(-1)).flatten(1)


def span_columns(columns: int, group: int) -> int:
    """Columns whose activations share a scale where `group` columns of a matrix's row do: two groups of 32, which saves
    one of the two multiplications with scales, or one group where they are wider or an odd number."""
    return 2 * SHORT_GROUP if group == SHORT_GROUP and columns // group % 2 == 0 else group


class CodeMatrix(Protocol):
    """A matrix [rows, width] of codes, made once from `Codes` (whose columns beyond `width` count nothing) and a bias
    [rows]. Activations are rounded to int8 with one scale a row and span of columns, the largest magnitude becoming
    127, so the sums of a group are exact integers; what is multiplied with offsets are the sums of a group's rounded
    activations, in bfloat16. A row of a result does not depend on the rows beside it."""

    rows: int
    width: int

    def product(self, x: Tensor, dtype: torch.dtype | None = None, residual: Tensor | None = None) -> Tensor:
        """x [T, width] -> [T, rows] in `dtype` (None: x's), plus residual [T, rows] of that dtype where given."""
        ...

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The product of x * weight / rms(x), weight [width] float32; that is not rounded in between."""
        ...

    def gated(self, x: Tensor, activation: str, residual: Tensor | None = None) -> Tensor:
        """The product of activation(gate) * up, x [T, 2 * width] being gate and then up, plus residual."""
        ...

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ids [T] int64 as floats [T, width]."""
        ...

    def tensors(self) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class LayerProgram:
    """A decoder layer as data, for backends that run whole layers: x += [after_attention norm of] out(attention(q, k,
    v)), q, k, v = qkv(norm(x)); then x += [after_mlp norm of] down(activation(gate) * up), gate, up = gate_up(norm(x)).

    qkv [query heads + 2 * kv heads] * head dim rows; kv_heads 0: the layer reads another one's cache. q_norm, k_norm
    [head dim]: RMS norms of each head with head_eps before the rotation. Norm weights are float32, None for no norm.
    """

    qkv: CodeMatrix
    out: CodeMatrix
    gate_up: CodeMatrix
    down: CodeMatrix
    before_attention: Tensor
    before_mlp: Tensor
    after_attention: Tensor | None
    after_mlp: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    head_eps: float
    query_heads: int
    kv_heads: int
    activation: str
    params: AttendParams


class StepKernel(Protocol):
    """One step over one cache group, its operands prepared once so that each layer's call is short."""

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
        """q [T, Hq, D], k [T, H, D], v [T, H, E], not yet rotated (rope None: rotated, or not to be). Rotates q and k,
        writes k and v into the step's slots (k = v = None: nothing is written), attends. Returns [T, Hq, E] in q's
        dtype. lse [T, Hq] float32 is filled where given."""
        ...

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        """x [T, heads, D], rotated."""
        ...

    def add_mass(self, q: Tensor, lse: Tensor, layer: int, params: AttendParams, mass: Tensor) -> None:
        """As `Backend.add_mass`, over this step's rows and tables."""
        ...


class PlainStep(NamedTuple):
    """A step in which layers only append and attend. kernels: each cache group's; places: each layer's group and its
    index within it."""

    kernels: tuple[StepKernel, ...]
    places: tuple[tuple[int, int], ...]


class Decoder(Protocol):
    """All layers of a model and its last norm, run over one step in one call: the same bits as layer by layer."""

    def run(
        self,
        x: Tensor,
        step: PlainStep,
        ropes: Sequence[Rope],
        rope_of: tuple[int, ...],
        read_rows: Tensor | None = None,
    ) -> Tensor:
        """x [T, hidden] -> [R, hidden], those of the rows read_rows [R] int64, ascending (None: of all). rope_of: for
        each layer, which of the rotations is its own; the same object in every step, as are the places of `step`."""
        ...


class Backend(Protocol):
    """One implementation of the operations. All are pure but for the tensors that their names say they write."""

    name: str

    def begin_step(
        self, rows: StepRows, table: TableView, pools: Sequence[PoolView], slots: Tensor | None = None
    ) -> StepKernel:
        """Prepare one group's step. pools[0] is the open pool; slots as in `write`, None where nothing is written.
        The tensors are read again at every call and must live as long as the result; positions in the
        blocks of a table row stay as they are when it is first read."""
        ...

    def decoder(self, layers: Sequence[LayerProgram], norm: Tensor, eps: float) -> Decoder | None:
        """Prepare all layers of a model and its last norm; None where this backend runs them operation by operation."""
        ...

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        """x [T, heads, D], rotated; new tensor or x itself rewritten."""
        ...

    def write(self, k: Tensor, v: Tensor, slots: Tensor, pool: PoolView, layer: int) -> None:
        """Write k [T, H, D], v [T, H, E] (already rotated) into slots [T, 1 or L, 1 or H] int64 = block * B + slot of
        an open (float) pool for the group's layer index `layer`. A slot of -1 is not written."""
        ...

    def attend(
        self, q: Tensor, rows: StepRows, table: TableView, pools: Sequence[PoolView], layer: int, params: AttendParams
    ) -> Attended:
        """q [T, Hq, D] (already rotated) over all blocks of each sequence's table rows, in any mix of formats.
        Tiled, running log-sum-exp; scores and sums in float32 (float64 for float64 q). KV heads never expanded."""
        ...

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
        """Add to mass [S, H, C, B] float32 the softmax weight that each slot of each sequence's table rows gets, summed
        over the step's queries of that sequence and the query heads of the KV head. q, lse as from `attend`."""
        ...

    def move_slots(self, pool: PoolView, source: Tensor, target: Tensor) -> None:
        """Copy single tokens: slots source [n] int64 (block * B + slot) onto target [n], all layers and heads that a
        block holds. The two sets are disjoint. Only for formats that are `rewritable`."""
        ...

    def seal(self, source: PoolView, source_blocks: Tensor, target: PoolView, target_blocks: Tensor) -> None:
        """Encode whole blocks source_blocks [n] int64 of a float pool into target_blocks [n] of another format's pool,
        for every layer and head they hold. Positions are not copied (the ledger's business)."""
        ...

    def decode(self, pool: PoolView, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of blocks [n] in float32: k [n, L, H, D, B], v [n, L, H, B, E]; unset slots undefined."""
        ...

    def copy_blocks(self, pool: PoolView, source: Tensor, target: Tensor) -> None:
        """Copy blocks source [n] int64 onto target [n], all layers and heads, bit for bit."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., n] * weight / rms(x), statistics in float32, result in x's dtype."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), the sum rounded to x's dtype first; x and residual [..., n]."""
        ...

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up; activation 'silu' or 'gelu_tanh'."""
        ...
