"""Prometheus metrics. Where one means the same as vLLM's it has vLLM's name behind our prefix (`--metrics-prefix vllm`
makes dashboards written for vLLM work)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvarn.engine.engine import Cache, Engine, StepResult
from kvarn.kv.recompute import RecomputeCache
from kvarn.kv.stats import CacheMemory
from kvarn.server.bridge import Finished, Observer, Work

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
TOKENS = (1, 4, 16, 64, 256, 1_024, 4_096, 16_384, 65_536)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is read from the engine between two steps when somebody asks for the metrics. spare_bytes: of blocks that
    only the prefix index holds; they make room when somebody needs it."""

    running: int
    waiting: int
    memory: CacheMemory
    spare_bytes: int


def snapshot(engine: Engine) -> Snapshot:
    scheduler, cache = engine.scheduler, engine.cache
    return Snapshot(scheduler.n_running, scheduler.n_waiting, cache.memory(), _spare_bytes(cache))


def _spare_bytes(cache: Cache) -> int:
    if isinstance(cache, RecomputeCache) or (prefixes := cache.prefixes) is None:
        return 0
    sizes = [(g, p, size) for g, group in enumerate(cache.groups) for p, size in enumerate(group.pool_block_bytes)]
    return sum(prefixes.spare_blocks(g, p) * size for g, p, size in sizes)


class Metrics(Observer):
    """One server's metrics, in a registry of their own."""

    def __init__(self, engine: Engine, prefix: str, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix, self._model = prefix, model_name
        self._last: dict[str, float] = {}  # request -> time of its last token
        self._make_gauges()
        self._make_counters()
        self._make_histograms()
        self.update(snapshot(engine))

    def _of(self, kind: type, name: str, text: str, labels: tuple[str, ...] = (), **more: tuple[float, ...]):
        metric = kind(f"{self._prefix}:{name}", text, ("model_name", *labels), registry=self.registry, **more)
        return metric if labels else metric.labels(self._model)

    def _make_gauges(self) -> None:
        self._running = self._of(Gauge, "num_requests_running", "Sequences that run.")
        self._waiting = self._of(Gauge, "num_requests_waiting", "Sequences that wait for the cache.")
        self._usage = self._of(
            Gauge, "kv_cache_usage_perc", "Bytes that sequences hold over bytes of all blocks, 0 to 1."
        )
        self._held = self._of(Gauge, "kv_cache_held_bytes", "Bytes of the blocks held.")
        self._spare = self._of(Gauge, "kv_cache_spare_bytes", "Of these, blocks that are only kept for later prompts.")
        self._pool = self._of(Gauge, "kv_cache_pool_bytes", "Bytes of all blocks, held or free.")
        self._logical = self._of(Gauge, "kv_cache_logical_bytes", "Tokens of all sequences in full precision.")
        self._stored = self._of(Gauge, "kv_cache_utilisation", "Tokens stored over slots of the held blocks, 0 to 1.")

    def _make_counters(self) -> None:
        self._prompt = self._of(Counter, "prompt_tokens", "Prompt tokens of finished requests.")
        self._generated = self._of(Counter, "generation_tokens", "Tokens generated.")
        self._queries = self._of(Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix index.")
        self._hits = self._of(Counter, "prefix_cache_hits", "Prompt tokens found in the prefix index.")
        self._preempted = self._of(Counter, "num_preemptions", "Sequences that lost their blocks.")
        self._success = self._of(Counter, "request_success", "Answers, by how they ended.", ("finished_reason",))
        self._waits = self._of(Counter, "steps_with_waiting", "Steps that left one waiting, by reason.", ("reason",))
        self._http = self._of(Counter, "http_requests", "HTTP requests.", ("method", "route", "status"))

    def _make_histograms(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS):
            return self._of(Histogram, name, text, buckets=buckets)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._itl = histogram("inter_token_latency_seconds", "From one token of a request to its next.")
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._queue = histogram("request_queue_time_seconds", "From arrival to admission.")
        self._prefill = histogram("request_prefill_time_seconds", "From admission to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From the first to the last token.")
        self._step = histogram("step_seconds", "One step of the engine.")
        self._step_tokens = histogram("iteration_tokens_total", "Token rows of a step.", TOKENS)
        self._prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._answer_size = histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)

    # -- on the engine's thread -----------------------------------------------------------------------------------
    def on_step(self, engine: Engine, result: StepResult) -> None:
        plan = result.plan
        self._step.observe(result.duration_s)
        self._step_tokens.observe(sum(r.new_tokens for r in plan.rows))
        self._generated.inc(sum(len(d.token_ids) for d in result.deltas))
        if plan.preempted:
            self._preempted.inc(len(plan.preempted))
        if plan.head_wait is not None:
            self._waits.labels(self._model, type(plan.head_wait).__name__).inc()
        self._time_tokens(result)

    def _time_tokens(self, result: StepResult) -> None:
        now_s = time.monotonic()
        for delta in result.deltas:
            key = f"{delta.request_id}/{delta.index}"
            if key in self._last and delta.token_ids:
                self._itl.observe(now_s - self._last[key])
            if delta.finish_reason is None:
                self._last[key] = now_s
            else:
                self._last.pop(key, None)

    def on_finished(self, work: Work, finished: Finished) -> None:
        output, times = finished.output, finished.output.timings
        for completion in output.completions:
            self._last.pop(f"{work.request_id}/{completion.index}", None)
            self._success.labels(self._model, completion.finish_reason).inc()
            self._answer_size.observe(len(completion.token_ids))
        self._prompt.inc(len(work.prompt_ids))
        self._queries.inc(len(work.prompt_ids))
        self._hits.inc(output.cached_tokens)
        self._prompt_size.observe(len(work.prompt_ids))
        self._queue.observe(times.queue_s)
        if any(c.token_ids for c in output.completions):
            self._ttft.observe(times.ttft_s)
            self._prefill.observe(times.prefill_s)
            self._decode.observe(times.decode_s)
            self._e2e.observe(times.ttft_s + times.decode_s)

    # -- on the event loop ----------------------------------------------------------------------------------------
    def count_http(self, method: str, route: str, status: int) -> None:
        self._http.labels(self._model, method, route, str(status)).inc()

    def update(self, now: Snapshot) -> None:
        memory = now.memory
        self._running.set(now.running)
        self._waiting.set(now.waiting)
        used_bytes = memory.physical_bytes - now.spare_bytes
        self._usage.set(used_bytes / memory.pool_bytes if memory.pool_bytes else 0)
        self._spare.set(now.spare_bytes)
        self._held.set(memory.physical_bytes)
        self._pool.set(memory.pool_bytes)
        self._logical.set(memory.logical_bytes)
        self._stored.set(memory.utilisation)

    def text(self) -> bytes:
        return generate_latest(self.registry)
