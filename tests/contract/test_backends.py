"""Every backend, on every instruction set of this machine, against the reference in float64.

The budget of an operation is twice the error of the reference in the operands' own precision, plus a few units in the
last place of what was summed. Free slots are poison (NaN) everywhere.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kvarn.core.errors import IncompatiblePlan, UnknownName
from kvarn.core.formats import format_names
from kvarn.kernels import backend_names, backend_report, load_backend
from kvarn.kernels.api import Attended, AttendParams, Backend, PoolView, Rope, TableView
from support.kernels import (
    LAYERS,
    REFERENCE,
    Bag,
    Heads,
    backend_ids,
    backends,
    empty_pool,
    make_bag,
    mixed_table,
    plain_params,
    queries,
    sealed,
)

BACKENDS = backends()
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=backend_ids)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

HEADS = (
    Heads(3, 3, 64, 64, 32),
    Heads(1, 4, 256, 256, 32),
    Heads(2, 1, 32, 32, 16),
    Heads(2, 8, 128, 128, 64),
    Heads(1, 7, 80, 96, 16),
    Heads(2, 2, 40, 48, 8),
    Heads(1, 6, 96, 64, 32),
)
LENGTHS = (150, 1, 31, 32, 33, 64)
QUERIES = (40, 1, 31, 1, 2, 1)
PARAMS: tuple[dict[str, object], ...] = (
    {},
    {"window_tokens": 20},
    {"soft_cap": 5.0},
    {"chunk_tokens": 24, "scale": 0.3},
    {"window_tokens": 1},
)


def errors(exact: Attended, plain: Attended, got: Attended) -> tuple[float, float, float]:
    def error(x: Tensor) -> float:
        return (x.double() - exact.out).abs().max().item()

    return error(plain.out), error(got.out), (got.lse.double() - exact.lse).abs().max().item()


def check_attend(
    backend: Backend, bag: Bag, table: TableView, pools: tuple[PoolView, ...], q: Tensor, params: AttendParams
) -> None:
    exact = REFERENCE.attend(q.double(), bag.rows, table, pools, 1, params)
    plain = REFERENCE.attend(q, bag.rows, table, pools, 1, params)
    got = backend.attend(q, bag.rows, table, pools, 1, params)
    plain_error, error, lse_error = errors(exact, plain, got)
    top = max(1.0, exact.out.abs().max().item())
    assert torch.isfinite(got.out).all()
    assert error <= 2 * plain_error + 4e-6 * top
    assert lse_error <= 2e-5 * max(1.0, exact.lse.abs().max().item())


@each_backend
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_attend_over_float_blocks(backend: Backend, heads: Heads, dtype: torch.dtype, stored: str) -> None:
    bag = make_bag(heads, LENGTHS, QUERIES)
    pool = bag.source if stored == "float32" else sealed(bag, stored)
    check_attend(backend, bag, bag.table, (pool,), queries(bag, dtype), plain_params(bag))


@each_backend
@pytest.mark.parametrize("changes", PARAMS, ids=str)
@pytest.mark.parametrize("stored", ["bfloat16", "int8", "int4", "turbo3"])
def test_attend_with_windows_caps_chunks_and_holes(backend: Backend, changes: dict[str, object], stored: str) -> None:
    bag = make_bag(HEADS[0], LENGTHS, QUERIES, drop=0.4)
    params = plain_params(bag, **changes)
    check_attend(backend, bag, bag.table, (sealed(bag, stored),), queries(bag, torch.bfloat16), params)


@each_backend
def test_attend_with_sinks(backend: Backend) -> None:
    bag = make_bag(HEADS[0], LENGTHS, QUERIES)
    params = plain_params(bag, sinks=torch.linspace(-2, 6, 9))
    check_attend(backend, bag, bag.table, (bag.source,), queries(bag, torch.float32), params)


@each_backend
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("fmt", [n for n in format_names() if not n.startswith("float")])
def test_attend_over_a_bag_of_two_formats(backend: Backend, heads: Heads, fmt: str) -> None:
    bag = make_bag(heads, LENGTHS, QUERIES)
    pools = (bag.source, sealed(bag, fmt))
    for dtype in (torch.float32, torch.bfloat16):
        check_attend(backend, bag, mixed_table(bag, 2), pools, queries(bag, dtype), plain_params(bag))


@each_backend
def test_attend_over_every_pair_of_formats(backend: Backend) -> None:
    """K of one format, V of another, beside open blocks."""
    heads = Heads(2, 5, 64, 32, 32)
    bag = make_bag(heads, (100, 33), (9, 1))
    q, table, params = queries(bag, torch.bfloat16), mixed_table(bag, 2), plain_params(bag)
    for k, v in itertools.product(format_names(), repeat=2):
        pools = (bag.source, sealed(bag, f"k={k},v={v}"))
        check_attend(backend, bag, table, pools, q, params)


@each_backend
def test_a_long_sequence_and_many_pools(backend: Backend) -> None:
    bag = make_bag(HEADS[0], (1500, 700), (1, 70), drop=0.1)
    pools = (bag.source, *(sealed(bag, f) for f in ("bfloat16", "int8", "int4", "turbo4")))
    check_attend(backend, bag, mixed_table(bag, 5), pools, queries(bag, torch.bfloat16), plain_params(bag))


@each_backend
@pytest.mark.parametrize(
    "heads", [Heads(1, 3, 256, 64, 32), Heads(1, 1, 64, 64, 256), Heads(1, 1, 64, 64, 512)], ids=str
)
@pytest.mark.parametrize("fmt", ["int8", "int4", "int3", "int2"])
def test_the_largest_sums_of_integers_fit(backend: Backend, heads: Heads, fmt: str) -> None:
    """Nearly all codes are the largest, and so is what they meet: equal weights, queries of one number."""
    bag = make_bag(heads, (512,), (1,))
    k, v = bag.source.k[0], bag.source.v[0]
    k[bag.blocks], v[bag.blocks] = 1.0, 1.0
    k[..., 0], v[..., ::32] = -1.0, -1.0
    for number in (0.0, 1.9921875):
        q = torch.full((1, heads.group, heads.k_dim), number, dtype=torch.bfloat16)
        check_attend(backend, bag, bag.table, (sealed(bag, fmt),), q, plain_params(bag))


@each_backend
def test_an_empty_bag_gives_zeros(backend: Backend) -> None:
    bag = make_bag(HEADS[0], (5,), (3,))
    nothing = TableView(bag.table.pool, bag.table.block, torch.zeros(1, dtype=torch.int32), bag.table.first_row, 0, 0)
    got = backend.attend(queries(bag, torch.float32), bag.rows, nothing, (bag.source,), 0, plain_params(bag))
    assert torch.equal(got.out, torch.zeros_like(got.out))
    assert torch.isneginf(got.lse).all()


@each_backend
def test_tables_by_layer_and_head(backend: Backend) -> None:
    """One table row a layer and head; the pool has no layer and head axis of its own."""
    heads = Heads(2, 2, 32, 32, 16)
    bag = make_bag(Heads(1, 4, 32, 32, 16), (40, 50, 60, 70), (1, 1, 1, 1))
    pool = bag.source
    flat = PoolView(
        pool.format,
        pool.block_size,
        tuple(t[:, :1].expand(-1, LAYERS, heads.kv, *t.shape[3:]) for t in pool.k),
        tuple(t[:, :1].expand(-1, LAYERS, heads.kv, *t.shape[3:]) for t in pool.v),
        pool.positions,
    )
    first = torch.zeros(1, dtype=torch.int32)  # rows: layer * 2 + head
    table = TableView(bag.table.pool, bag.table.block, bag.table.length, first, layer_stride=2, head_stride=1)
    rows = type(bag.rows)(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([69], dtype=torch.int32), 1)
    q = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    for layer in range(LAYERS):
        exact = REFERENCE.attend(q.double(), rows, table, (flat,), layer, plain_params(bag))
        got = backend.attend(q, rows, table, (flat,), layer, plain_params(bag))
        assert (got.out - exact.out).abs().max() < 1e-5


@each_backend
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("fmt", format_names())
def test_seal_and_decode(backend: Backend, heads: Heads, fmt: str) -> None:
    """The same codes as the reference's, but for rounding ties of the rotated formats; the same numbers from them."""
    bag = make_bag(heads, LENGTHS, QUERIES, drop=0.2)
    want, got = sealed(bag, fmt), sealed(bag, fmt, backend)
    for a, b in zip((*want.k, *want.v), (*got.k, *got.v), strict=True):
        different = (a[bag.blocks].float() != b[bag.blocks].float()).float().mean().item()
        assert different <= (0.02 if fmt.startswith("turbo") else 0.0)
    for a, b in zip(REFERENCE.decode(want, bag.blocks), backend.decode(want, bag.blocks), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
        assert torch.isfinite(b).all()
    outside = torch.tensor([b for b in range(got.positions.shape[0]) if b not in set(bag.blocks.tolist())])
    fresh = empty_pool(fmt, 1, heads)
    for a, b in zip((*got.k, *got.v), (*fresh.k, *fresh.v), strict=True):
        assert torch.equal(a[outside].view(torch.uint8), b[[0] * len(outside)].view(torch.uint8)), "touched a block"


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_rotate_write_and_attend_in_one_call(backend: Backend, dtype: torch.dtype, stored: str) -> None:
    """The fused call does what rope, write and attend do one after the other, on views into one product."""
    heads = Heads(2, 3, 64, 48, 32)
    bag = make_bag(heads, (70, 1, 33), (40, 1, 2))
    t, hq, hk = bag.tokens, heads.kv * heads.group, heads.kv
    g = torch.Generator().manual_seed(5)
    qkv = torch.randn(t, hq * 64 + hk * 64 + hk * 48, generator=g).to(dtype)
    q, k, v = qkv.split((hq * 64, hk * 64, hk * 48), dim=1)
    q, k, v = q.view(t, hq, 64), k.view(t, hk, 64), v.view(t, hk, 48)
    angle = torch.rand(t, 24, generator=g) * 6  # the last 16 channels are not rotated
    rope = Rope(angle.cos(), angle.sin())
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor((40, 1, 2)))
    at = bag.rows.positions.long()
    slots = (bag.table.block[sequence, at // 32] * 32 + at % 32).long().view(-1, 1, 1)
    pools = [sealed(bag, stored) for _ in range(2)]
    outs = [
        b.begin_step(bag.rows, bag.table, (p,), slots).append_and_attend(q, k, v, rope, 1, plain_params(bag))
        for b, p in zip((REFERENCE, backend), pools, strict=True)
    ]
    tolerance = max(ROUNDING[dtype], ROUNDING[getattr(torch, stored)])
    torch.testing.assert_close(outs[1], outs[0], rtol=2 * tolerance, atol=2 * tolerance)
    for a, b in zip((*pools[0].k, *pools[0].v), (*pools[1].k, *pools[1].v), strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(backend.rope(q, rope), REFERENCE.rope(q, rope), rtol=tolerance, atol=tolerance)


@each_backend
def test_a_slot_of_minus_one_is_not_written(backend: Backend) -> None:
    heads = Heads(2, 1, 32, 32, 16)
    pool = empty_pool("float32", 2, heads)
    k, v = torch.ones(3, 2, 32), torch.ones(3, 2, 32)
    backend.write(k, v, torch.tensor([-1, 17, -1]).view(3, 1, 1), pool, 0)
    assert pool.k[0].isfinite().sum() == 2 * 32
    assert (pool.k[0][1, 0, :, :, 1] == 1).all()
    assert (pool.v[0][1, 0, :, 1] == 1).all()


@each_backend
@pytest.mark.parametrize("stored", ["float32", "int4", "turbo4"])
@pytest.mark.parametrize("changes", PARAMS[:3], ids=str)
def test_attention_mass(backend: Backend, stored: str, changes: dict[str, object]) -> None:
    bag = make_bag(HEADS[0], (300, 40), (60, 1), drop=0.2)
    pool = bag.source if stored == "float32" else sealed(bag, stored)
    q, params = queries(bag, torch.float32), plain_params(bag, **changes)
    attended = REFERENCE.attend(q, bag.rows, bag.table, (pool,), 1, params)
    shape = (2, 3, bag.table.block.shape[1], 32)
    want, got = torch.ones(shape), torch.ones(shape)
    for b, mass in ((REFERENCE, want), (backend, got)):
        b.add_mass(q, attended.lse, bag.rows, bag.table, (pool,), 1, params, mass)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (got - 1).sum().item() == pytest.approx(bag.tokens * 9, rel=1e-4)  # each row's weights sum to one


@each_backend
@pytest.mark.parametrize("fmt", format_names())
def test_copy_blocks_and_move_slots(backend: Backend, fmt: str) -> None:
    bag = make_bag(Heads(2, 1, 32, 32, 16), (64,), (1,))
    a, b = sealed(bag, fmt), sealed(bag, fmt)
    one, other = bag.blocks[:2], bag.blocks[2:4]
    REFERENCE.copy_blocks(a, one, other)
    backend.copy_blocks(b, one, other)
    if a.format.rewritable:
        source, target = bag.blocks[0] * 16 + torch.arange(3), bag.blocks[1] * 16 + torch.arange(3) + 5
        REFERENCE.move_slots(a, source, target)
        backend.move_slots(b, source, target)
    else:
        with pytest.raises(IncompatiblePlan, match="rewritten"):
            backend.move_slots(b, torch.tensor([0]), torch.tensor([17]))
    for x, y in zip((*a.k, *a.v), (*b.k, *b.v), strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 33, 576, 1536])
def test_small_operations(backend: Backend, dtype: torch.dtype, width: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(7, width, generator=g).to(dtype) for _ in range(2))
    weight, both = torch.rand(width, generator=g).to(dtype), (torch.randn(7, 2 * width, generator=g) * 4).to(dtype)
    close = {"rtol": ROUNDING[dtype] * 2, "atol": ROUNDING[dtype]}
    torch.testing.assert_close(backend.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), **close)
    normed, total = backend.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, REFERENCE.rms_norm(x + residual, weight, 1e-5), **close)
    heads = x.view(7, 1, width).expand(7, 3, width)
    torch.testing.assert_close(backend.rms_norm(heads, weight, 1e-5), REFERENCE.rms_norm(heads, weight, 1e-5), **close)
    for activation in ("silu", "gelu_tanh"):
        got, want = (b.gated(*both.chunk(2, dim=-1), activation) for b in (backend, REFERENCE))
        torch.testing.assert_close(got, want, **close)
    with pytest.raises(UnknownName, match="silu"):
        backend.gated(x, x, "relu")


@each_backend
def test_what_it_does_not_take_is_refused(backend: Backend) -> None:
    bag = make_bag(HEADS[0], (5,), (1,))
    with pytest.raises(IncompatiblePlan, match=r"float64.*reference"):
        backend.attend(queries(bag, torch.float64), bag.rows, bag.table, (bag.source,), 0, plain_params(bag))


def test_backends_are_found_by_name() -> None:
    assert set(backend_names()) == {"cpu", "reference"}
    assert load_backend("reference").name == "reference"
    assert load_backend().name == next(r.name for r in backend_report() if r.available)
    with pytest.raises(UnknownName, match="cpu"):
        load_backend("cpuu")
