"""Check a backend against the reference on this machine, in a second or two: what `kvarn doctor` shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.core.formats import KVFormat, format_names, parse_kv_format
from kvarn.kernels.api import AttendParams, Backend, PoolView, StepRows, TableView

KV_HEADS, GROUP, DIM, BLOCK, LAYERS = 2, 3, 64, 32, 1
LENGTHS, QUERIES = (300, 33), (40, 1)


@dataclass(frozen=True, slots=True)
class Check:
    """One operation's largest error against the reference in float64, and the limit: twice the error of the reference
    in the operands' own precision, and a few units in the last place."""

    name: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


def self_check(backend: Backend, reference: Backend) -> tuple[Check, ...]:
    """Attention over every format in bfloat16 and float32, sealing and decoding, norms and gates."""
    bag = _Bag()
    checks = [
        _attend(backend, reference, bag, parse_kv_format(name), dtype)
        for name in format_names()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    return (*checks, *_seals(backend, reference, bag), *_small(backend, reference))


class _Bag:
    """Two sequences in a poisoned pool of float32 blocks, which lie in no order."""

    def __init__(self) -> None:
        g = self.random = torch.Generator().manual_seed(0)
        columns = [-(-n // BLOCK) for n in LENGTHS]
        self.n_blocks = sum(columns) + 1
        order = torch.randperm(self.n_blocks, generator=g).int()
        block = torch.zeros((len(LENGTHS), max(columns)), dtype=torch.int32)
        self.source = self.pool("float32")
        at = 0
        for s, (length, n) in enumerate(zip(LENGTHS, columns, strict=True)):
            block[s, :n], at = order[at : at + n], at + n
            slots = torch.arange(length)
            b, j = block[s, slots // BLOCK].long(), slots % BLOCK
            self.source.positions[b, j] = slots.int()
            self.source.k[0][b, ..., j] = torch.randn((length, LAYERS, KV_HEADS, DIM), generator=g)
            self.source.v[0][b, :, :, j] = torch.randn((length, LAYERS, KV_HEADS, DIM), generator=g)
        self.blocks = order[:-1].long()
        starts = torch.tensor([0, *QUERIES], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        spans = [torch.arange(n - q, n, dtype=torch.int32) for n, q in zip(LENGTHS, QUERIES, strict=True)]
        self.rows = StepRows(starts, torch.cat(spans), max(QUERIES))
        pool = (torch.arange(block.shape[1]) % 2).to(torch.uint8).expand_as(block).contiguous()
        lengths, first = torch.tensor(columns, dtype=torch.int32), torch.arange(len(LENGTHS), dtype=torch.int32)
        self.table = TableView(pool, block, lengths, first, 0, 0)

    def pool(self, name: str) -> PoolView:
        fmt: KVFormat = parse_kv_format(name)

        def poisoned(shape: tuple[int, ...], dtype: str) -> Tensor:
            t = torch.empty((self.n_blocks, LAYERS, KV_HEADS, *shape), dtype=getattr(torch, dtype))
            return t.fill_(float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).max)

        k = tuple(poisoned(t.shape, t.dtype) for t in fmt.k.k_layout(DIM, BLOCK))
        v = tuple(poisoned(t.shape, t.dtype) for t in fmt.v.v_layout(DIM, BLOCK))
        return PoolView(fmt, BLOCK, k, v, torch.full((self.n_blocks, BLOCK), -1, dtype=torch.int32))

    def sealed(self, name: str, backend: Backend) -> PoolView:
        pool = self.pool(name)
        pool.positions.copy_(self.source.positions)
        backend.seal(self.source, self.blocks, pool, self.blocks)
        return pool


def _worst(a: Tensor, b: Tensor) -> float:
    """The largest difference; NaN counts as infinite."""
    return (a.double() - b.double()).abs().nan_to_num(nan=torch.inf).max().item()


def _attend(backend: Backend, reference: Backend, bag: _Bag, fmt: KVFormat, dtype: torch.dtype) -> Check:
    pools = (bag.source, bag.sealed(fmt.name, reference))
    q = torch.randn((sum(QUERIES), KV_HEADS * GROUP, DIM), generator=torch.Generator().manual_seed(1)).to(dtype)
    params = AttendParams(DIM**-0.5)
    exact = reference.attend(q.double(), bag.rows, bag.table, pools, 0, params).out
    plain = reference.attend(q, bag.rows, bag.table, pools, 0, params).out
    got = backend.attend(q, bag.rows, bag.table, pools, 0, params).out
    short = str(dtype).removeprefix("torch.")
    return Check(f"attend {fmt.name}, {short}", _worst(got, exact), 2 * _worst(plain, exact) + 1e-5)


def _seals(backend: Backend, reference: Backend, bag: _Bag) -> list[Check]:
    """Decoded numbers of blocks that the backend sealed, against those of the reference's, over all tokens' norm."""
    checks = []
    held = bag.source.positions[bag.blocks] >= 0
    exact = reference.decode(bag.source, bag.blocks)[1][..., :][held[:, None, None].expand(-1, LAYERS, KV_HEADS, -1)]
    for name in format_names():
        errors = []
        for sealer in (reference, backend):
            v = sealer.decode(bag.sealed(name, sealer), bag.blocks)[1]
            kept = v[held[:, None, None].expand(-1, LAYERS, KV_HEADS, -1)]
            errors.append(((kept - exact).norm() / exact.norm()).item())
        checks.append(Check(f"seal {name}", errors[1], 1.01 * errors[0] + 1e-6))
    return checks


def _small(backend: Backend, reference: Backend) -> list[Check]:
    g = torch.Generator().manual_seed(2)
    x, y, weight = (torch.randn(shape, generator=g) for shape in ((5, 576), (5, 576), (576,)))
    pairs = (
        ("rms_norm", lambda b: b.rms_norm(x, weight, 1e-5)),
        ("add_rms_norm", lambda b: b.add_rms_norm(x, y, weight, 1e-5)[0]),
        ("gated silu", lambda b: b.gated(x, y, "silu")),
        ("gated gelu_tanh", lambda b: b.gated(x, y, "gelu_tanh")),
    )
    return [Check(name, _worst(run(backend), run(reference)), 1e-5) for name, run in pairs]
