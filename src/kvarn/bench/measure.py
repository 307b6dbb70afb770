"""Running one case on Kvarn's engine in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from kvarn.bench.cases import Case, Timing
from kvarn.core.requests import SamplingParams
from kvarn.engine.llm import LLM

_names = itertools.count()


def context_for(tokens: int) -> int:
    """Whole blocks of 64 that hold so many tokens."""
    return -(-tokens // 64) * 64


def run_case(llm: LLM, case: Case, prompts: Sequence[Sequence[int]]) -> Timing:
    """Greedy answers to all prompts at once, timed step by step."""
    engine, params = llm.engine, SamplingParams(max_tokens=case.output_tokens, ignore_eos=True, temperature=0.0)
    begun = time.perf_counter()
    waiting = {f"bench-{next(_names)}" for _ in prompts}
    for name, ids in zip(sorted(waiting), prompts, strict=True):
        engine.add_request(name, ids, params, patient=True)
    first = begun
    while engine.has_work:
        result = engine.step()
        if waiting:
            waiting -= {d.request_id for d in result.deltas if d.token_ids}
            first = time.perf_counter()
    return Timing(first - begun, time.perf_counter() - first)
