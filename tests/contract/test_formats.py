"""Every KV format found: what it stores, what it counts, how far off it is."""

from __future__ import annotations

import math

import pytest
import torch

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.formats import format_names, load_format, parse_kv_format
from kvarn.core.specs import ELEMENT_BYTES
from support.format_bounds import LLOYD_MAX, bound
from support.kernels import REFERENCE, Heads, empty_pool, make_bag, sealed

each_format = pytest.mark.parametrize("name", format_names())
QUANTIZED = tuple(n for n in format_names() if load_format(n).sealed_only)

BITS_OF_SMOLLM = {  # K and V of a head of 64 in blocks of 32, scales and zero points counted
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "fp8_e4m3": 8.0,
    "int8": 8.25,
    "int4": 5.0,
    "int3": 4.0,
    "int2": 3.0,
    "turbo4": 4.25,
    "turbo3": 3.25,
    "turbo2": 2.25,
}


@each_format
def test_bits_a_number(name: str) -> None:
    fmt = parse_kv_format(name)
    assert fmt.block_bytes(64, 64, 32) * 8 / (2 * 64 * 32) == BITS_OF_SMOLLM[name]


@each_format
@pytest.mark.parametrize("heads", [Heads(2, 1, 64, 64, 32), Heads(1, 1, 256, 128, 16), Heads(1, 1, 40, 48, 8)], ids=str)
def test_layouts_are_what_is_allocated(name: str, heads: Heads) -> None:
    pool = empty_pool(name, 3, heads)
    held = sum(t.untyped_storage().nbytes() for t in (*pool.k, *pool.v))
    assert held == 3 * 2 * heads.kv * pool.format.block_bytes(heads.k_dim, heads.v_dim, heads.block)
    assert pool.format.v.elements(pool.v[0].shape[-1]) == heads.v_dim
    assert all(t.nbytes == t.element_size() * math.prod(t.shape) for t in (*pool.k, *pool.v))


@each_format
def test_rewritable_means_that_each_token_has_entries_of_its_own(name: str) -> None:
    fmt = load_format(name)
    layouts = (*fmt.k_layout(64, 32), *fmt.v_layout(64, 32))
    assert fmt.rewritable == all(t.token_axis is not None for t in layouts)
    assert all(t.token_axis is None or t.shape[t.token_axis] == 32 for t in layouts)
    assert all(t.dtype in ELEMENT_BYTES for t in layouts)


@pytest.mark.parametrize("name", format_names())
@pytest.mark.parametrize("outlier", [1.0, 40.0])
def test_round_trip_error_is_within_the_bound(name: str, outlier: float) -> None:
    """On random keys and values of which one channel is an outlier, as keys have."""
    bag = make_bag(Heads(2, 1, 64, 64, 32), (128,), (1,), seed=4)
    bag.source.k[0][:, :, :, 7] *= outlier
    want, got = REFERENCE.decode(bag.source, bag.blocks), REFERENCE.decode(sealed(bag, name), bag.blocks)
    for key, (a, b) in ((True, (want[0].transpose(-1, -2), got[0].transpose(-1, -2))), (False, (want[1], got[1]))):
        for x, y in zip(a.flatten(0, 2), b.flatten(0, 2), strict=True):
            assert ((x - y).abs() <= bound(name, x, key=key)).all()


@pytest.mark.parametrize("name", LLOYD_MAX)
@pytest.mark.parametrize("outlier", [1.0, 40.0])
def test_rotated_formats_do_no_worse_than_on_gaussian_numbers_whatever_the_outliers(name: str, outlier: float) -> None:
    bag = make_bag(Heads(2, 1, 128, 128, 32), (512,), (1,), seed=4)
    bag.source.k[0][:, :, :, 7] *= outlier
    want, got = REFERENCE.decode(bag.source, bag.blocks), REFERENCE.decode(sealed(bag, name), bag.blocks)
    for a, b in zip(want, got, strict=True):
        error = ((a - b).square().sum() / a.square().sum()).item()
        assert 0.7 * LLOYD_MAX[name] <= error <= 1.02 * LLOYD_MAX[name]


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_empty_slots_hold_never_leaves_them(name: str) -> None:
    """Poison in empty slots changes no code and no scale of the others, and decodes to finite numbers."""
    bag = make_bag(Heads(1, 1, 64, 64, 32), (50,), (1,), drop=0.3)
    poisoned = sealed(bag, name)
    held = bag.source.positions >= 0
    bag.source.k[0].masked_fill_(~held[:, None, None, None, :], 3.0)
    bag.source.v[0].masked_fill_(~held[:, None, None, :, None], -5.0)
    clean = sealed(bag, name)
    for a, b in zip((*poisoned.k, *poisoned.v), (*clean.k, *clean.v), strict=True):
        assert torch.equal(a[bag.blocks].view(torch.uint8), b[bag.blocks].view(torch.uint8))
    assert all(torch.isfinite(x).all() for x in REFERENCE.decode(poisoned, bag.blocks))


@pytest.mark.parametrize("name", QUANTIZED)
def test_huge_and_zero_numbers(name: str) -> None:
    """fp8 saturates; scales stay finite; a block of zeros comes back as zeros."""
    bag = make_bag(Heads(1, 1, 32, 32, 32), (32,), (1,))
    bag.source.k[0].nan_to_num_().mul_(1e6)
    bag.source.v[0].zero_()
    k, v = REFERENCE.decode(sealed(bag, name), bag.blocks)
    assert torch.isfinite(k).all()
    assert torch.equal(v, torch.zeros_like(v))
    if name == "fp8_e4m3":
        assert k.abs().max() == 448.0


@pytest.mark.parametrize("name", [n for n in QUANTIZED if load_format(n).k_layout(64, 32)[0].dtype == "uint8"])
def test_sizes_that_do_not_pack_are_refused(name: str) -> None:
    with pytest.raises(IncompatiblePlan, match=r"multiple of 8.*block-size"):
        load_format(name).k_layout(64, 12)
    with pytest.raises(IncompatiblePlan, match=r"multiple of 8|groups of 8"):
        load_format(name).v_layout(68, 32)
