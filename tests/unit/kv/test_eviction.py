"""Dropping tokens of one sequence leaves the others that share its blocks as they are."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.core.requests import SamplingParams
from kvarn.kv.choice import parse_policy
from kvarn.kv.manager import CacheManager
from kvarn.kv.policies.base import Decision
from kvarn.kv.reading import group_view
from kvarn.kv.step import Span
from support.engines import make_engine

IDS = [(i * 37 + i * i) % 250 for i in range(60)]


@pytest.mark.parametrize("kv", ["knorm:24,recent=4", "snapkv:24,query_tokens=4", "tova:24,recent=4", "h2o:24"])
def test_answers_that_share_a_prompt_are_each_as_alone(kv: str) -> None:
    alone = answers(kv, 1)
    assert answers(kv, 3) == alone * 3


def answers(kv: str, n: int) -> list[tuple[int, ...]]:
    """Greedy answers to one prompt, decoded side by side, over poisoned pages."""
    engine = make_engine(kv=kv, block_size=8)
    engine.add_request("r", IDS, SamplingParams(n=n, max_tokens=40, ignore_eos=True))
    while engine.has_work:
        result = engine.step()
        engine.cache.check()
    return [tuple(c.token_ids) for c in result.finished[0].completions]


def test_a_sequence_keeps_what_its_twin_drops() -> None:
    engine = make_engine(kv="float32", block_size=8, grain="head")
    engine.add_request("r", IDS, SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    cache = engine.cache
    (first,) = cache.sequences
    twin = first + 1
    assert cache.fork(first, twin) is None
    state = cache.sequences[twin]
    state.policy, state.decided_blocks = parse_policy("knorm:16,recent=4"), -1
    decision = cache.decide(twin)
    assert decision is not None and cache.apply(twin, decision)
    cache.check()
    assert positions(cache, twin) != positions(cache, first)
    assert positions(cache, first) == [list(range(len(IDS)))] * len(positions(cache, first))
    cache.release(twin)
    cache.check()
    assert positions(cache, first) == [list(range(len(IDS)))] * len(positions(cache, first))


def test_the_block_of_the_new_end_is_the_sequences_own_before_it_grows() -> None:
    """All of a shared last block is kept, but its tokens move to holes before it: the next token must find it empty."""
    engine = make_engine(kv="float32", block_size=8)
    engine.add_request("r", IDS, SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    cache = engine.cache
    (first,) = cache.sequences
    twin, n = first + 1, len(IDS)
    assert cache.fork(first, twin) is None
    cache.sequences[twin].policy = parse_policy("knorm:57,recent=4")  # one that drops single tokens
    keep = np.ones((1, n), dtype=bool)
    keep[0, 1:4] = False
    assert cache.apply(twin, Decision((keep,) * len(cache.groups)))
    cache.check()
    assert cache.extend(twin, n + 1) is None
    cache.begin_step([Span(twin, n, 1)])
    cache.check()
    assert positions(cache, twin) == [[0, *range(4, n)]] * len(positions(cache, twin))
    assert positions(cache, first) == [list(range(n))] * len(positions(cache, first))


def positions(cache: CacheManager, seq_id: int) -> list[list[int]]:
    """The logical positions that each table row of the sequence holds, in order."""
    found: list[list[int]] = []
    for group, row in zip(cache.groups, cache.sequences[seq_id].rows, strict=True):
        view = group_view(group, row, cache.sequences[seq_id].length, None)
        found += [sorted(p for p in line if p >= 0) for line in view.positions.tolist()]
    return found
