"""The C++ module (csrc/module.cpp). Addresses are those of tensors' first elements; 0 where an operand is absent."""

from collections.abc import Sequence

_Part = tuple[int, int, int, int]

class Pool:
    def __init__(
        self,
        k_codec: int,
        k_group: int,
        k: Sequence[_Part],
        v_codec: int,
        v_group: int,
        v: Sequence[_Part],
        positions: int,
        block_size: int,
        /,
    ) -> None: ...

class Step:
    def __init__(
        self, isa: str, pools: Sequence[Pool], kv_heads: int, k_dim: int, v_dim: int, n_threads: int, /
    ) -> None: ...
    def address(self) -> int: ...
    def set_table(
        self,
        pool: int,
        block: int,
        length: int,
        first_row: int,
        rows: int,
        columns: int,
        layer_stride: int,
        head_stride: int,
        /,
    ) -> None: ...
    def set_rows(self, query_start: int, positions: int, n_seqs: int, n_tokens: int, /) -> None: ...
    def set_slots(self, slots: int, token: int, layer: int, head: int, open_pool: int, /) -> None: ...
    def append_and_attend(
        self,
        layer: int,
        q: int,
        q_token: int,
        k: int,
        k_token: int,
        v: int,
        v_token: int,
        out: int,
        lse: int,
        dtype: int,
        query_heads: int,
        cos: int,
        sin: int,
        half: int,
        scale: float,
        window: int,
        chunk: int,
        soft_cap: float,
        sinks: int,
        /,
    ) -> None: ...
    def write(self, layer: int, k: int, k_token: int, v: int, v_token: int, dtype: int, /) -> None: ...
    def rope(self, x: int, token: int, out: int, dtype: int, heads: int, cos: int, sin: int, half: int, /) -> None: ...
    def mass(
        self,
        layer: int,
        q: int,
        q_token: int,
        lse: int,
        mass: int,
        dtype: int,
        query_heads: int,
        scale: float,
        window: int,
        chunk: int,
        soft_cap: float,
        /,
    ) -> None: ...

class Small:
    def __init__(self, isa: str, /) -> None: ...
    def rms_norm(
        self,
        x: int,
        x_row: int,
        residual: int,
        residual_row: int,
        weight: int,
        out: int,
        sum: int,
        rows: int,
        width: int,
        dtype: int,
        weight_dtype: int,
        eps: float,
        n_threads: int,
        /,
    ) -> None: ...
    def gated(
        self,
        gate: int,
        gate_row: int,
        up: int,
        up_row: int,
        out: int,
        rows: int,
        width: int,
        dtype: int,
        activation: int,
        n_threads: int,
        /,
    ) -> None: ...

class Matrix:
    def __init__(
        self,
        isa: str,
        data: int,
        rows: int,
        columns: int,
        width: int,
        group: int,
        bits: int,
        offsets: bool,
        bias: int,
        /,
    ) -> None: ...
    def product(
        self,
        x: int,
        x_row: int,
        dtype: int,
        rows: int,
        before: int,
        norm: int,
        eps: float,
        activation: int,
        residual: int,
        residual_row: int,
        out: int,
        out_dtype: int,
        n_threads: int,
        /,
    ) -> None: ...
    def gather(self, ids: int, rows: int, out: int, dtype: int, n_threads: int, /) -> None: ...

def seal(
    isa: str,
    source: Pool,
    source_blocks: int,
    target: Pool,
    target_blocks: int,
    n_blocks: int,
    layers: int,
    heads: int,
    k_dim: int,
    v_dim: int,
    n_threads: int,
    /,
) -> None: ...
def decode(
    isa: str,
    pool: Pool,
    blocks: int,
    k: int,
    v: int,
    n_blocks: int,
    layers: int,
    heads: int,
    k_dim: int,
    v_dim: int,
    n_threads: int,
    /,
) -> None: ...
def instruction_sets() -> list[str]: ...
def use_team(gomp_parallel: int, /) -> None: ...
def uses_shared_team() -> bool: ...
def read_bandwidth(isa: str, data: int, n_bytes: int, n_threads: int, repeats: int, /) -> float: ...
def float_rate(isa: str, n_threads: int, repeats: int, /) -> float: ...

class Decoder:
    def __init__(self, isa: str, norm: int, norm_dtype: int, eps: float, /) -> None: ...
    def add(
        self,
        qkv: Matrix,
        out: Matrix,
        gate_up: Matrix,
        down: Matrix,
        norms: Sequence[int],
        eps: float,
        head_eps: float,
        query_heads: int,
        kv_heads: int,
        activation: int,
        scale: float,
        window: int,
        chunk: int,
        soft_cap: float,
        sinks: int,
        /,
    ) -> None: ...
    def lay(self, places: Sequence[tuple[int, int, int]], /) -> None: ...
    def run(
        self,
        x: int,
        out: int,
        rows: int,
        dtype: int,
        steps: Sequence[int],
        ropes: Sequence[tuple[int, int, int]],
        read: int,
        n_read: int,
        n_threads: int,
        /,
    ) -> None: ...
