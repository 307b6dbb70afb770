"""Running one case on Kvarn's engine in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from kvarn.bench.cases import Case, Timing
from kvarn.core.options import EngineOptions
from kvarn.core.requests import SamplingParams
from kvarn.engine.llm import LLM

STEP_TOKENS = EngineOptions.step_tokens
_names = itertools.count()


def context_for(tokens: int) -> int:
    """Whole blocks of 64 that hold so many tokens."""
    return -(-tokens // 64) * 64


def run_case(llm: LLM, case: Case, prompts: Sequence[Sequence[int]]) -> Timing:
    """Greedy answers to all prompts at once, timed step by step. Where decoding alone counts, answers are made so long
    that all of them still grow when the last prompt is computed, and cut when all have grown by the case's tokens."""
    engine, longer = llm.engine, _longer(case, llm.plan.step_tokens)
    params = SamplingParams(max_tokens=case.output_tokens + longer, ignore_eos=True, temperature=0.0)
    begun = time.perf_counter()
    names = sorted(f"bench-{next(_names)}" for _ in prompts)
    for name, ids in zip(names, prompts, strict=True):
        engine.add_request(name, ids, params, patient=True)
    waiting, first, steps = set(names), begun, 0
    while engine.has_work and not (longer and steps == case.output_tokens - 1):
        result = engine.step()
        steps += not waiting
        if waiting:
            waiting -= {d.request_id for d in result.deltas if d.token_ids}
            first = time.perf_counter()
    ended = time.perf_counter()
    for name in names:
        engine.cancel(name)
    return Timing(first - begun, ended - first)


def longest_tokens(case: Case, step_tokens: int = STEP_TOKENS) -> int:
    """Of the sequences that `run_case` makes."""
    return case.prompt_tokens + case.output_tokens + _longer(case, step_tokens)


def _longer(case: Case, step_tokens: int) -> int:
    """Steps that the prompts take while the first answers grow already; 0 where that does not matter."""
    if case.counted != "decode" or case.streams == 1:
        return 0
    left_tokens = max(1, step_tokens - case.streams)
    return case.streams * (1 + -(-case.prompt_tokens // left_tokens))
