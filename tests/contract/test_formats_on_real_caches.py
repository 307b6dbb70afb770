"""Every format on the keys and values that the two models really make, outliers and all.

`pytest -s` on this file prints the table of errors by bits, which `docs/log.md` shows."""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from kvarn.core.formats import format_names, load_format
from support.format_bounds import LLOYD_MAX, bound
from support.real_caches import BLOCK_TOKENS, RealCache, real_cache

pytestmark = [pytest.mark.model, pytest.mark.slow]
MODELS = ("smollm2-135m", "gemma3-270m")
TOKENS = 384
SIDES: tuple[Literal["k", "v"], ...] = ("k", "v")


class Errors(NamedTuple):
    """bits a number at this model's head dim; root mean square errors over root mean square, of the numbers of one
    side and of what attention makes of them when only that side is in the format."""

    bits: float
    numbers: float
    attended: float


@functools.cache
def cache_of(model: str) -> RealCache:
    return real_cache(model, TOKENS)


def pairs(cache: RealCache, name: str, side: str) -> list[tuple[Tensor, Tensor]]:
    """(written, decoded) [blocks, layers, heads, tokens, channels] of each group."""
    at = SIDES.index(side)  # pyright: ignore[reportArgumentType]
    return [(cache.decoded(g, "float32")[at], cache.decoded(g, name)[at]) for g in range(len(cache.pools))]


def relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Root mean square error over root mean square."""
    energy = sum(float(a.double().square().sum()) for a, _ in pairs)
    return math.sqrt(sum(float((a.double() - b).square().sum()) for a, b in pairs) / energy)


def measured(model: str, name: str, side: str) -> Errors:
    cache, fmt = cache_of(model), load_format(name)
    numbers = pairs(cache, name, side)
    dim = numbers[0][0].shape[-1]
    held = fmt.k_block_bytes(dim, BLOCK_TOKENS) if side == "k" else fmt.v_block_bytes(dim, BLOCK_TOKENS)
    mixed = f"k={name},v=float32" if side == "k" else f"k=float32,v={name}"
    outs = [
        pair
        for g in range(len(cache.pools))
        for pair in zip(cache.attended(g, "float32"), cache.attended(g, mixed), strict=True)
    ]
    return Errors(held * 8 / (dim * BLOCK_TOKENS), relative(numbers), relative(outs))


@pytest.mark.parametrize("model", MODELS)
def test_the_models_keys_have_outliers(model: str) -> None:
    """What makes real keys hard is there: some channel is far larger than the median one."""
    ratios = []
    for group in range(len(cache_of(model).pools)):
        k = cache_of(model).decoded(group, "float32")[0]
        rms = k.square().mean((0, 3)).sqrt()  # [layers, heads, channels]
        ratios.append(float((rms.amax(-1) / rms.median(-1).values).max()))
    print(f"{model}: largest channel of keys over the median one, worst head: {max(ratios):.0f}")
    assert max(ratios) > 5


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", format_names())
def test_round_trip_is_within_the_stated_bound(name: str, side: str, model: str) -> None:
    for written, decoded in pairs(cache_of(model), name, side):
        assert torch.isfinite(decoded).all()
        assert ((written - decoded).abs() <= bound(name, written, key=side == "k")).all()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", LLOYD_MAX)
def test_rotation_makes_real_numbers_as_easy_as_gaussian_ones(name: str, side: str, model: str) -> None:
    assert relative(pairs(cache_of(model), name, side)) ** 2 <= 1.02 * LLOYD_MAX[name]


# Root mean square error of attention over its root mean square, where one side alone is in the format: what either
# model may lose on either side.
ATTENDED = {
    "float32": 1e-6,
    "float16": 0.0006,
    "bfloat16": 0.005,
    "fp8_e4m3": 0.07,
    "int8": 0.035,
    "int4": 0.09,
    "int3": 0.19,
    "int2": 0.45,
    "turbo4": 0.19,
    "turbo3": 0.37,
    "turbo2": 0.70,
}


@pytest.mark.parametrize("model", MODELS)
def test_attention_is_within_the_stated_bound(model: str) -> None:
    """All formats in one table; each is judged, and the table is printed before the first that fails."""
    found = {(name, side): measured(model, name, side) for name in format_names() for side in SIDES}
    print(f"\n{model}, {TOKENS} tokens\nformat     side  bits  numbers  attention")
    for (name, side), e in sorted(found.items(), key=lambda item: item[1].bits):
        print(f"{name:10} {side:4} {e.bits:5.2f}  {e.numbers:7.4f}  {e.attended:9.4f}")
    above = {at: e.attended for at, e in found.items() if e.attended > ATTENDED[at[0]]}
    assert not above


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", format_names())
def test_attention_adds_nothing_to_the_error_of_values(name: str, model: str) -> None:
    """Its output is a weighted mean of values, so no channel is further off than the worst value of that channel."""
    cache = cache_of(model)
    for group in range(len(cache.pools)):
        limit = bound(name, cache.decoded(group, "float32")[1], key=False).amax((0, 3))  # [layers, heads, channels]
        layers = [a.layer for a in cache.asked if a.group == group]
        exact, got = cache.attended(group, "float32"), cache.attended(group, f"k=float32,v={name}")
        for layer, a, b in zip(layers, exact, got, strict=True):
            each = limit[layer].repeat_interleave(a.shape[1] // limit.shape[1], 0)
            assert ((a - b).abs() <= each * (1 + 1e-5) + 1e-5).all()
