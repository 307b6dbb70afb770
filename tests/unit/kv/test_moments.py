"""The moments of a sequence's queries are those of all of them, however the text was cut into steps."""

from __future__ import annotations

import pytest
import torch

from kvarn.core.options import EngineOptions
from kvarn.core.requests import SamplingParams
from kvarn.kernels.api import Rope
from kvarn.kv.manager import CacheManager
from kvarn.kv.moments import QueryMoments, scaled
from support.engines import make_engine

LAYERS, HEADS, DIM, TOKENS, SKIP = 2, 3, 8, 150, 4


def queries(seed: int = 0) -> torch.Tensor:
    """[L, t, Hq, D], far from the origin, so that a difference of large sums would show."""
    return torch.randn((LAYERS, TOKENS, HEADS, DIM), generator=torch.Generator().manual_seed(seed)) + 30.0


@pytest.mark.parametrize("steps", [(150,), (1,) * 150, (3, 1, 60, 40, 33, 13), (2, 1, 1, 146), (100, 50)])
def test_cuts_do_not_show(steps: tuple[int, ...]) -> None:
    q, moments, at = queries(), QueryMoments(SKIP, LAYERS), 0
    for n in steps:
        for layer in range(LAYERS):
            moments.push(layer, q[layer, at : at + n], None)
        moments.commit(n)
        at += n
    mean, covariance = moments.read()
    counted = q[:, SKIP:].double().transpose(1, 2)  # [L, Hq, t, D]
    away = counted - counted.mean(2, keepdim=True)
    torch.testing.assert_close(mean, counted.mean(2).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(covariance, (away.mT @ away / (TOKENS - SKIP)).float(), rtol=1e-5, atol=1e-6)


def test_what_does_not_count_is_left_out_and_copies_go_their_own_way() -> None:
    q, moments = queries(), QueryMoments(0, LAYERS)
    for layer in range(LAYERS):
        moments.push(layer, q[layer, :20], None)
    moments.commit(12)
    for layer in range(LAYERS):
        moments.push(layer, q[layer, 12:30], None)
    moments.abort()
    child = moments.copy()
    for layer in range(LAYERS):
        child.push(layer, q[layer, 12:100], None)
    child.commit(88)
    torch.testing.assert_close(moments.read()[0], q[:, :12].mean(1))
    torch.testing.assert_close(child.read()[0], q[:, :100].mean(1))


def test_a_scaled_rotation_scales() -> None:
    angles = torch.rand((5, 3)) * 6
    x = torch.randn((5, 2, 8))
    got = scaled(x, Rope(1.3 * angles.cos(), 1.3 * angles.sin()))
    torch.testing.assert_close(got, torch.cat((1.3 * x[..., :6], x[..., 6:]), -1))


def read(steps_of: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments in an engine that computes a prompt so many tokens a step."""
    policy = "expected_attention:16"
    engine = make_engine(**{**vars(EngineOptions()), **{"policy": policy, "step_tokens": steps_of}, **SMALLER})
    engine.add_request(
        "a", [(7 * i * i + 3 * i) % 250 for i in range(90)], SamplingParams(max_tokens=9, ignore_eos=True)
    )
    cache = engine.cache
    assert isinstance(cache, CacheManager)
    while not cache.sequences or cache.sequences[0].length < 94:
        engine.step()
        assert engine.has_work
    (moments,) = cache.sequences[0].moments
    assert moments is not None
    assert moments.seen == 94 and moments.skip == 4
    return moments.read()


SMALLER = {"weights": "float32", "block_size": 4, "context_tokens": 128, "max_seqs": 4, "poison": True}


def test_an_engine_sums_up_the_same_whatever_its_steps() -> None:
    whole, parts = read(90), read(17)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert float(whole[1].diagonal(dim1=-2, dim2=-1).min()) > 0
