"""Running one case on Kvarn's engine in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from kvarn.bench.cases import Case, Timing
from kvarn.core.errors import DoesNotFit
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
    begun = time.perf_counter()
    streams = Streams(llm, prompts, case.output_tokens + longer)
    first, steps = time.perf_counter(), 0
    while engine.has_work and not (longer and steps == case.output_tokens - 1):
        streams.step()
        steps += 1
    ended = time.perf_counter()
    streams.end()
    return Timing(first - begun, ended - first)


class Streams:
    """Greedy answers that grow together, of at most max_tokens each; made, every one of them has its first token."""

    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._engine, self._max_tokens = llm.engine, max_tokens
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        self._grown = dict.fromkeys(sorted(f"bench-{next(_names)}" for _ in prompts), 0)
        for name, ids in zip(self._grown, prompts, strict=True):
            self._engine.add_request(name, ids, params, patient=True)
        while self._engine.has_work and not all(self._grown.values()):
            self.step()

    @property
    def left_tokens(self) -> int:
        """By which all of them can still grow."""
        return self._max_tokens - max(self._grown.values())

    def step(self) -> int:
        """One step of the engine: the tokens that it brought."""
        own = [d for d in self._engine.step().deltas if d.request_id in self._grown]
        for delta in own:
            self._grown[delta.request_id] += len(delta.token_ids)
        return sum(len(d.token_ids) for d in own)

    def end(self) -> None:
        """Their memory is free."""
        for name in self._grown:
            self._engine.cancel(name)


class KeptCase:
    """A kept case's streams, which stay in the engine from one measurement to the next."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._case: Case | None = None
        self._streams: Streams | None = None

    def run(self, case: Case, prompts: Sequence[Sequence[int]]) -> Timing:
        """The time of output_tokens - 1 steps of all streams, and before them that of the prompts, where they are
        computed: when the case is another one than before, and when the cache is full. Raises DoesNotFit."""
        begun = time.perf_counter()
        steps = case.output_tokens - 1
        if self._streams is None or case != self._case or self._streams.left_tokens < steps:
            self.end()
            most = _room_tokens(self._llm, case.streams) - case.prompt_tokens
            self._streams, self._case = Streams(self._llm, prompts, max(1, most)), case
        first = time.perf_counter()
        tokens = sum(self._streams.step() for _ in range(steps))
        ended = time.perf_counter()
        if tokens != case.streams * steps:
            self.end()
            raise DoesNotFit(f"{case.streams} streams decoded {tokens} tokens in {steps} steps: the cache is too small")
        return Timing(first - begun, ended - first)

    def end(self) -> None:
        """Stop its streams."""
        if self._streams is not None:
            self._streams.end()
        self._streams = None


def _room_tokens(llm: LLM, streams: int) -> int:
    """Tokens that each of so many streams may hold, by the context and by the cache's memory."""
    plan = llm.plan
    blocks = plan.nbytes // (plan.bytes_per_token * plan.block_size)
    return min(plan.context_tokens, blocks // streams * plan.block_size)


def longest_tokens(case: Case, step_tokens: int = STEP_TOKENS) -> int:
    """Of the sequences that `run_case` makes."""
    return case.prompt_tokens + case.output_tokens + _longer(case, step_tokens)


def _longer(case: Case, step_tokens: int) -> int:
    """Steps that the prompts take while the first answers grow already; 0 where that does not matter."""
    if case.counted != "decode" or case.streams == 1:
        return 0
    left_tokens = max(1, step_tokens - case.streams)
    return case.streams * (1 + -(-case.prompt_tokens // left_tokens))
