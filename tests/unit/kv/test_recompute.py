"""`--cache none`: one layer's scratch, nothing between steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvarn.core.options import EngineOptions
from kvarn.core.specs import LayerSpec
from kvarn.kernels import load_backend
from kvarn.kernels.api import AttendParams
from kvarn.kv.recompute import RecomputeCache
from kvarn.kv.sizing import plan_cache
from kvarn.kv.step import Span

FULL = LayerSpec(2, 8, 8, 4)
LAYERS = [FULL, FULL, replace(FULL, window_tokens=3)]


def make() -> RecomputeCache:
    options = EngineOptions(cache="none", block_size=4, context_tokens=20)
    plan = plan_cache(LAYERS, options, max_context=None, default_format="float32", free_bytes=0)
    return RecomputeCache(plan, LAYERS, load_backend("reference"), poison=True)


def test_each_layer_reads_its_own_numbers_from_the_one_scratch() -> None:
    cache, spans = make(), [Span(0, 0, 5), Span(1, 0, 4), Span(2, 0, 1)]
    step = cache.begin_step(spans)
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0]
    generator = torch.Generator().manual_seed(0)
    for index, spec in enumerate(LAYERS):
        q, k, v = (torch.randn(10, h, 8, generator=generator) for h in (4, 2, 2))
        out = step.layer(index).append_and_attend(q, k, v, None, AttendParams(0.3, window_tokens=spec.window_tokens))
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        for begin, end in ((0, 5), (5, 9), (9, 10)):
            at = torch.arange(end - begin)
            seen = at[None] <= at[:, None]
            if spec.window_tokens:
                seen &= at[None] > at[:, None] - spec.window_tokens
            scores = torch.einsum("qhd,khd->hqk", q[begin:end], k[begin:end]) * 0.3
            exact = torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(~seen, -torch.inf), -1), v[begin:end])
            torch.testing.assert_close(out[begin:end], exact)


def test_the_scratch_is_one_layers_blocks() -> None:
    cache = make()
    cache.begin_step([Span(0, 0, 5), Span(1, 0, 4)])
    # 2 groups, 3 blocks each, whatever the layers: heads x (K + V) channels x tokens x bytes
    assert cache.scratch_bytes_peak == 2 * 3 * 2 * 16 * 4 * 4
    assert cache.memory().physical_bytes == cache.peak.physical_bytes == 0
    cache.reset_peak()
    assert cache.scratch_bytes_peak == 0


def test_only_whole_sequences() -> None:
    with pytest.raises(AssertionError, match="every span starts at token 0"):
        make().begin_step([Span(0, 1, 2)])


def test_only_the_context_limits() -> None:
    assert make().never_fits(20) is None
    assert make().never_fits(21) == "21 tokens; the context is 20 tokens"
