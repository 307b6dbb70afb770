"""Kvarn's own speed over depths, batches and cache formats, and what the cache buys."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvarn.bench.cases import Case, prompt_ids, tokens_per_s
from kvarn.bench.measure import context_for, longest_tokens, run_case
from kvarn.core.files import ModelFiles
from kvarn.core.options import Numerics
from kvarn.core.requests import SamplingParams
from kvarn.engine.llm import LLM
from kvarn.kv.manager import CacheManager

Model = str | Path | ModelFiles | None
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """runs of one case with one cache, in tokens a second."""

    case: Case
    engine: str
    runs: tuple[float, ...]

    @property
    def value(self) -> float:
        return statistics.median(self.runs)


def engine_cases(depths: Sequence[int], batches: Sequence[int]) -> tuple[Case, ...]:
    """Prefill of 512 tokens, decoding at each depth, each batch at a short context."""
    deep = [Case(f"decode_at_{d}", 1, d, 32, "decode") for d in depths]
    wide = [Case(f"batch_{b}", b, 32, 32, "decode") for b in batches]
    return (Case("prefill_512", 1, 512, 1, "prefill"), *deep, *wide)


def sweep(
    model: Model,
    formats: Sequence[str | None],
    cases: Sequence[Case],
    repeats: int,
    threads: int,
    progress: Progress,
    numerics: Sequence[Numerics] = ("invariant",),
    weights: str = "native",
) -> list[Figure]:
    """Every case with every cache and every numerics, which take turns in each round."""
    longest = context_for(max(longest_tokens(c) for c in cases))
    most = max(c.streams for c in cases)
    engines = {}
    for kv, how in itertools.product(formats, numerics):
        name = " ".join((kv or "kvarn", *((how,) if len(numerics) > 1 else ())))
        progress(f"loading {name}")
        engines[name] = LLM(
            model,
            threads=threads,
            kv=kv,
            weights=weights,
            numerics=how,
            max_seqs=most,
            context_tokens=longest,
            prefix_caching=False,
        )
    runs: dict[tuple[Case, str], list[float]] = {}
    for round_number in range(repeats + 1):  # the first warms up
        for case in cases:
            for name, llm in engines.items():
                progress(f"round {round_number} of {repeats}: {case.name}, {name}")
                speed = tokens_per_s(case, run_case(llm, case, prompt_ids(case, llm.model.vocab_size)))
                if round_number:
                    runs.setdefault((case, name), []).append(speed)
    return [Figure(case, name, tuple(values)) for (case, name), values in runs.items()]


@dataclass(frozen=True, slots=True)
class Growth:
    """Seconds a token while the text grows: at `tokens` of text, with the cache and without."""

    tokens: tuple[int, ...]
    with_cache_s: tuple[float, ...]
    without_s: tuple[float, ...]


def growth(model: Model, lengths: Sequence[int], threads: int, progress: Progress) -> Growth:
    """The median time of four tokens after each length of text. Without a cache each step computes the text again."""
    measured: dict[str, list[float]] = {"paged": [], "none": []}
    for cache, times in measured.items():
        llm = LLM(
            model,
            threads=threads,
            cache=cache,
            max_seqs=1,
            context_tokens=context_for(max(lengths) + 8),
            prefix_caching=False,
        )
        for length in lengths:
            progress(f"{'with' if cache == 'paged' else 'without'} cache: {length} tokens of text")
            times.append(_token_time(llm, length))
    return Growth(tuple(lengths), tuple(measured["paged"]), tuple(measured["none"]))


def _token_time(llm: LLM, length: int) -> float:
    ids = prompt_ids(Case("", 1, length, 6, "decode"), llm.model.vocab_size)[0]
    llm.engine.add_request(f"grow-{length}", ids, SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0))
    steps = []
    while llm.engine.has_work:
        begun = time.perf_counter()
        result = llm.engine.step()
        if result.deltas:
            steps.append(time.perf_counter() - begun)
    return statistics.median(steps[1:])  # the first ends the prompt


@dataclass(frozen=True, slots=True)
class Use:
    """How one cache used its memory while a mix of requests ran: of each step, tokens stored / slots reserved and
    requests running; the steps and seconds that it took."""

    cache: str
    utilisation: tuple[float, ...]
    running: tuple[int, ...]
    seconds: float

    @property
    def mean_utilisation(self) -> float:
        return statistics.fmean(self.utilisation) if self.utilisation else 0.0


def utilisation(
    model: Model, lengths: Sequence[tuple[int, int]], context: int, budget_bytes: int, threads: int, progress: Progress
) -> list[Use]:
    """The same requests, (prompt tokens, answer tokens) each, in the same memory: in blocks, and in one reservation of
    the whole context a request."""
    uses = []
    for cache in ("paged", "contiguous"):
        llm = LLM(
            model,
            threads=threads,
            cache=cache,
            max_seqs=min(64, len(lengths)),
            context_tokens=context,
            kv_memory_bytes=budget_bytes,
            prefix_caching=False,
        )
        uses.append(_use(llm, cache, lengths, progress))
    return uses


def _use(llm: LLM, cache: str, lengths: Sequence[tuple[int, int]], progress: Progress) -> Use:
    engine, begun = llm.engine, time.perf_counter()
    assert isinstance(engine.cache, CacheManager)
    for index, (prompt, answer) in enumerate(lengths):
        ids = [(31 * index + 7 * at) % (llm.model.vocab_size - 300) + 300 for at in range(prompt)]
        engine.add_request(f"{cache}-{index}", ids, SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0))
    used, running = [], []
    while engine.has_work:
        engine.step()
        now = engine.cache.memory()
        if now.reserved_slots:
            used.append(now.utilisation)
            running.append(now.sequences)
        progress(f"{cache}: {len(used)} steps, {now.sequences} requests running")
    return Use(cache, tuple(used), tuple(running), time.perf_counter() - begun)
