"""Reading a text again stores nothing, and sees what the same tokens would see if they were stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from kvarn.core.options import Grain
from kvarn.engine.rereading import CHUNK_TOKENS, LEAD_TOKENS, read_again_where_due, repetitions
from kvarn.engine.runner import run_model
from kvarn.kv.manager import CacheManager
from kvarn.kv.policies.base import Budget, Decision, KVPolicy, SequenceView, Signal
from kvarn.kv.policies.kvzip import KVzip
from kvarn.kv.reading import group_view
from kvarn.kv.step import Span
from kvarn.kv.view import StepInputs
from kvarn.models.base import CausalLM
from support.engines import make_engine
from support.models import byte_tokenizer, tiny_model

TEXT = [(11 * i * i + 5 * i) % 250 for i in range(43)]
SAID = [9, 8, 7, *TEXT[12:30]]
AGAIN = range(12, 30)


@dataclass(frozen=True)
class LastQueries(KVPolicy):
    """Keeps everything and the queries of what was read again."""

    grain: ClassVar[Grain] = "head"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.RECENT_QUERIES})
    query_tokens: int = field(default=len(SAID), kw_only=True)

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        return False

    def decide(self, view: SequenceView) -> Decision | None:
        return None


def cache_with_text(model: CausalLM, policy: KVPolicy, kv: str | None = None) -> CacheManager:
    """TEXT is in the cache of sequence 0."""
    cache = make_engine(model, grain="head", prefix_caching=False, kv=kv, residual_tokens=4).cache
    assert isinstance(cache, CacheManager)
    cache.assign(0, policy, len(TEXT))
    assert cache.admit(0, TEXT, b"") == 0
    stored(model, cache, TEXT)
    return cache


def stored(model: CausalLM, cache: CacheManager, ids: Sequence[int]) -> Tensor:
    at = cache.sequences[0].length
    assert cache.extend(0, at + len(ids)) is None
    hidden = run_model(model, cache, [Span(0, at, len(ids))], [ids], [128]).hidden
    cache.commit(0, ids)
    return hidden


@pytest.mark.parametrize("kv", [None, "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_it_sees_what_stored_tokens_would_see(name: str, kv: str | None) -> None:
    model = tiny_model(name)
    cache = cache_with_text(model, LastQueries(), kv)
    before = cache.memory(), cache.sequences[0].length
    step = cache.begin_rereading(0, len(SAID), AGAIN)
    with torch.inference_mode():
        inputs = StepInputs(torch.tensor(SAID), step.positions, cache.backend, torch.full((len(SAID),), 128))
        hidden = model.forward(inputs, step)
    assert (cache.memory(), cache.sequences[0].length) == before
    cache.check()
    if kv is not None:  # stored tokens are rounded as they are sealed, those that are read again are not
        return
    expected = stored(model, cache, SAID)
    torch.testing.assert_close(hidden, expected, rtol=2e-4, atol=2e-4)
    state, seen = cache.sequences[0], 0
    for group, row, ring, weights in zip(cache.groups, state.rows, state.rings, step.weights, strict=True):
        if weights is None:
            continue
        view = group_view(group, row, state.length, ring)
        for r, positions in enumerate(view.positions):
            largest = view.recent_weights(r).max((0, 1))
            at = [int(np.flatnonzero(positions == p)[0]) for p in AGAIN]
            np.testing.assert_allclose(weights[r], largest[at], rtol=1e-3, atol=1e-5)
            seen += 1
    assert seen


def test_each_token_is_read_again_once_behind_what_announces_it() -> None:
    text = list(range(2 * CHUNK_TOKENS + 5))
    parts = list(repetitions(text, byte_tokenizer()))
    assert [again for _, again in parts] == [range(0, 512), range(512, 1024), range(1024, 1029)]
    for ids, again in parts:
        assert ids[-len(again) :] == text[again.start : again.stop]
        lead = ids[: -len(again)]
        if again.start:
            assert lead[-LEAD_TOKENS - 1 : -1] == text[again.start - LEAD_TOKENS : again.start]


def test_a_text_is_read_again_once_and_only_where_something_must_go() -> None:
    model = tiny_model("llama")
    roomy = cache_with_text(model, KVzip(Budget(tokens=100)))
    read_again_where_due(model, roomy, 0, byte_tokenizer())
    assert roomy.sequences[0].reread == ()
    cache = cache_with_text(model, KVzip(Budget(tokens=20)))
    read_again_where_due(model, cache, 0, byte_tokenizer())
    (weights,) = cache.sequences[0].reread
    assert weights is not None and weights.shape == (4, len(TEXT)) and (weights > 0).all()
    assert not cache.wants_rereading(0)
    decision = cache.decide(0)
    assert decision is not None and cache.apply(0, decision)
    cache.check()
    stored(model, cache, TEXT[:4])
    assert not cache.wants_rereading(0) and cache.decide(0) is not None
