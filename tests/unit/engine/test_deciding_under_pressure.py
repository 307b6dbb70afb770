"""Decisions that take blocks, in caches far too small for all that run: whatever is preempted for them, every request
has the tokens and the bytes of each format that it has where there is room for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvarn.core.requests import SamplingParams
from kvarn.kv.manager import CacheManager
from support.engines import SMALL, Watch, block_bytes, make_engine
from support.models import tiny_model

POLICIES = {
    "copies": ("snapkv:16,window=8", {}),
    "copies_int8": ("knorm:16,recent=4", {"kv": "int8", "residual_tokens": 4}),
    "tiers": ("tiered:36,recent=4,sinks=2,heavy_share=0.95,light=fp8_e4m3", {}),
    "turns": ("window:20,sinks=5,positions=cache", {}),
    "turns_int8": ("window:20,sinks=5,positions=cache", {"kv": "int8", "residual_tokens": 0}),
}
COMMON = list(b"the wheel goes round and")


def served(policy: str, options: dict[str, Any], blocks: int | None, n: int) -> tuple[list[Any], Watch, int]:
    """Answers, what the engine did, and how many decisions had to wait for blocks."""
    asked: dict[str, Any] = {"policy": policy, "block_size": 4, "max_seqs": 12, "step_tokens": 40, **options}
    room: dict[str, Any] = {}
    if blocks is not None:
        room = {"kv_memory_bytes": blocks * block_bytes(tiny_model("llama"), replace(SMALL, **asked))}
    watch, waited = Watch(make_engine(**asked, **room)), 0
    for i in range(6):
        params = SamplingParams(max_tokens=24, ignore_eos=True, n=n, temperature=0.7, seed=i)
        watch.engine.add_request(str(i), [*COMMON, *range(40 + i, 44 + 2 * i)], params)
    while watch.engine.has_work:
        watch.step()
        assert isinstance(watch.engine.cache, CacheManager)
        waited += sum(s.decision is not None for s in watch.engine.cache.sequences.values())
    outputs = [watch.outputs[str(i)].completions for i in range(6)]
    assert all(c.finish_reason == "length" for each in outputs for c in each)
    return [(c.token_ids, c.trace and c.trace.bytes_by_format) for each in outputs for c in each], watch, waited


CASES = [
    ("copies", 3, 14),
    ("copies_int8", 3, 14),
    ("copies_int8", 3, 18),
    ("copies_int8", 3, 23),
    ("tiers", 2, 22),
    ("turns", 2, 14),
    ("turns_int8", 2, 14),
    ("turns_int8", 2, 20),
]


@pytest.mark.parametrize(("name", "n", "blocks"), CASES)
def test_a_small_cache_changes_no_token(name: str, n: int, blocks: int) -> None:
    policy, options = POLICIES[name]
    roomy, large, _ = served(policy, options, None, n)
    tight, small, waited = served(policy, options, blocks, n)
    assert tight == roomy
    assert small.preemptions + waited and not large.preemptions
