"""The engine: `step` is the map of the project. Schedule, build, run, sample, commit, emit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index

from kvarn.core.cache_params import CacheParams
from kvarn.core.errors import InvalidRequest
from kvarn.core.requests import CompletionTrace, Delta, RequestOutput, SamplingParams
from kvarn.engine.guide import Guide
from kvarn.engine.request import CompletionState, RequestState, Watch
from kvarn.engine.runner import StepRun, run_model
from kvarn.engine.sampler import Sampled, sample, token_logprob
from kvarn.engine.scheduler import Scheduler
from kvarn.engine.sequence import Entry
from kvarn.engine.step_plan import Row, StepPlan
from kvarn.engine.verify import Verifier, Watched
from kvarn.kv.manager import CacheManager
from kvarn.kv.policies.base import KVPolicy
from kvarn.kv.recompute import RecomputeCache
from kvarn.kv.settling import policy_for
from kvarn.kv.step import Span
from kvarn.models.base import CausalLM
from kvarn.text import Tokenizer

Cache = CacheManager | RecomputeCache


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: pieces of answers, and the requests that are finished."""

    deltas: tuple[Delta, ...]
    finished: tuple[RequestOutput, ...]
    plan: StepPlan
    duration_s: float


@dataclass(frozen=True, slots=True)
class _Place:
    """Which completion of which request a sequence is."""

    request: RequestState
    completion: CompletionState


class Engine:
    """Many requests, one model, one cache. Not thread-safe: one thread calls it.

    add_request and cancel at any time between steps; step while `has_work`.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        cache: Cache,
        scheduler: Scheduler,
        *,
        clock: Callable[[], float] = time.monotonic,
        policy: KVPolicy | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self.model, self.tokenizer, self.cache, self.scheduler = model, tokenizer, cache, scheduler
        self._clock, self.policy, self.verifier = clock, policy, verifier
        self._requests: dict[str, RequestState] = {}
        self._places: dict[int, _Place] = {}
        self._next_seq_id = 0
        self._pending: list[Delta] = []

    # -- requests -------------------------------------------------------------------------------------------------
    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        namespace: bytes = b"",
        deadline_s: float | None = None,
        guide: Guide | None = None,
        policy: KVPolicy | None = None,
        cache: CacheParams | None = None,
        watch: Watch | None = None,
        replayed_tokens: int = 0,
    ) -> RequestState:
        """Queue a request. deadline_s: seconds from now. guide: constrains the answers. cache: its choice of cache;
        policy: decides over blocks, where `cache` does not say so. None: the engine's own. watch: is told the
        hidden states of its rows, those of its first answer. replayed_tokens: the last tokens of the prompt that go
        through the cache as if they had been generated. Raises InvalidRequest, DoesNotFit and IncompatiblePlan, and
        then nothing has changed.
        """
        prompt_ids = self._checked(request_id, prompt_ids, params)
        now = self._clock()
        first = self._next_seq_id
        state = RequestState.new(request_id, prompt_ids, params, self.tokenizer, first, now, guide)
        entry = Entry(
            seq_id=first,
            prompt_ids=state.prompt_ids,
            max_tokens=params.max_tokens,
            arrival_s=now,
            child_ids=tuple(range(first + 1, first + params.n)),
            priority=priority,
            tenant=tenant,
            namespace=namespace,
            deadline_s=None if deadline_s is None else now + deadline_s,
            reuse_prompt=params.prompt_logprobs is None and watch is None,
            replayed_tokens=replayed_tokens,
            block_tokens=self.cache.plan.block_size,
        )
        state.watch = self.verifier.watch(prompt_ids, state.seed) if self.verifier and watch is None else watch
        self._enter(
            entry, policy_for(cache, self.cache.plan, policy or self.policy) if cache else policy or self.policy
        )
        self._next_seq_id += params.n
        self._requests[request_id] = state
        for completion in state.completions:
            self._places[completion.seq_id] = _Place(state, completion)
        return state

    def _enter(self, entry: Entry, policy: KVPolicy | None) -> None:
        seq_ids = (entry.seq_id, *entry.child_ids)
        for seq_id in seq_ids:
            self.cache.assign(seq_id, policy, len(entry.prompt_ids) - entry.replayed_tokens)
        try:
            self.scheduler.add(entry)
        except Exception:
            for seq_id in seq_ids:
                self.cache.unassign(seq_id)
            raise

    def _checked(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        """The prompt as plain integers, all of them tokens of the model."""
        if request_id in self._requests:
            raise InvalidRequest(f"request id {request_id!r} is in use", fixes=("choose another id",))
        if not len(prompt_ids):
            raise InvalidRequest("the prompt is empty", fixes=("give at least one token",))
        try:
            ids = tuple(index(t) for t in prompt_ids)
        except TypeError as error:
            raise InvalidRequest(f"the prompt holds what is no token id: {error}", fixes=("use integers",)) from error
        size = self.model.vocab_size
        if (bad := next((t for t in (*ids, *params.logit_bias) if not 0 <= t < size), None)) is not None:
            raise InvalidRequest(
                f"token id {bad} is outside the vocabulary of {size}", fixes=("use the model's tokenizer",)
            )
        return ids

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; its blocks are free on return. None where it is unknown or done."""
        if (state := self._requests.get(request_id)) is None:
            return None
        for completion in state.completions:
            if completion.finish_reason is None:
                self._end(state, completion, "cancelled")
        return self._requests.pop(request_id).output()

    def _end(self, state: RequestState, completion: CompletionState, reason: str, error: str | None = None) -> None:
        self._trace(completion)
        self.scheduler.cancel(completion.seq_id)
        self._places.pop(completion.seq_id, None)
        self.cache.unassign(completion.seq_id)
        self._pending.append(state.end(completion, reason, error))

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def request(self, request_id: str) -> RequestState:
        """A living request, to read. KeyError where it is unknown or done."""
        return self._requests[request_id]

    # -- a step ---------------------------------------------------------------------------------------------------
    def step(self) -> StepResult:
        """One step over all that run. An error of the model ends the requests of this step, and is raised."""
        begun = self._clock()
        plan = self.scheduler.schedule(begun)
        for ended in plan.ended:
            place = self._places.get(ended.seq_id)
            if place and place.completion.finish_reason is None:
                self._end(place.request, place.completion, "error", str(ended))
        for admitted in plan.admitted:
            if place := self._places.get(admitted.seq_id):
                place.request.started_s = begun if place.request.started_s is None else place.request.started_s
                place.request.cached_tokens = max(place.request.cached_tokens, admitted.cached_tokens)
        if plan.rows:
            self._compute(plan.rows)
        return self._result(plan, begun)

    def _compute(self, rows: tuple[Row, ...]) -> None:
        spans = [Span(r.seq_id, r.start, r.n_tokens) for r in rows]
        tokens = [self.scheduler.sequence(r.seq_id).tokens[r.start : r.start + r.n_tokens] for r in rows]
        try:
            run = self._run(rows, spans, tokens)
            chosen = self._choose(rows, run)
        except Exception as error:
            self._fail(spans, error)
            raise
        except BaseException:  # interrupted: nothing of the step counts, and it can be run again
            self.cache.abort_step(spans)
            raise
        for row, fed in zip(rows, tokens, strict=True):
            self.cache.commit(row.seq_id, fed)
            if decision := self.cache.decide(row.seq_id):
                self.cache.apply(row.seq_id, decision)
        self._take(rows, chosen)

    def _run(self, rows: Sequence[Row], spans: Sequence[Span], tokens: Sequence[Sequence[int]]) -> StepRun:
        reach = [self._reach(r.seq_id) for r in rows]
        return run_model(self.model, self.cache, spans, tokens, reach)

    def _reach(self, seq_id: int) -> int:
        request = self._places[seq_id].request
        return len(request.prompt_ids) + request.params.max_tokens

    def _fail(self, spans: Sequence[Span], error: Exception) -> None:
        """Nothing of this step counts; its requests end, with all their completions."""
        self.cache.abort_step(spans)
        for request in dict.fromkeys(self._places[s.seq_id].request for s in spans):
            for completion in request.completions:
                if completion.finish_reason is None:
                    self._end(request, completion, "error", f"{type(error).__name__}: {error}")

    def _choose(self, rows: Sequence[Row], run: StepRun) -> list[Sampled]:
        """Read all that is wanted of the logits before anything is committed: prompt log-probabilities, then the next
        token of each row that samples, followed by the first of each of its children."""
        for at, row in enumerate(rows):
            place = self._places[row.seq_id]
            if place.request.params.prompt_logprobs is not None:
                self._score_prompt(row, place, run, at)
            if place.request.watch is not None and place.completion.index == 0:
                place.request.watch(row.start, run.rows(at))
        sampling = [(i, r) for i, r in enumerate(rows) if r.samples]
        wanted = [(i, self._places[s]) for i, r in sampling for s in (r.seq_id, *r.children)]
        logits = run.last_logits([i for i, _ in wanted])
        return sample(logits, [place.request.sample_row(place.completion) for _, place in wanted])

    def _take(self, rows: Sequence[Row], chosen: Sequence[Sampled]) -> None:
        """The chosen tokens go to their completions, which may end with them."""
        now = self._clock()
        sequences = [s for r in rows if r.samples for s in (r.seq_id, *r.children)]
        places = [self._places[s] for s in sequences]
        deltas = iter(
            [
                place.request.take(place.completion, got, self.tokenizer.end_ids, now)
                for place, got in zip(places, chosen, strict=True)
            ]
        )
        for row in rows:
            own = [next(deltas)] if row.samples else []
            self.scheduler.advance(row.seq_id, row.n_tokens, own[0].token_ids if own else ())
            for child in row.children:
                own.append(next(deltas))
                self.scheduler.fork(child, own[-1].token_ids)
            self._pending.extend(own)
            self._close([s for s, d in zip((row.seq_id, *row.children), own, strict=False) if d.finish_reason])

    def _close(self, seq_ids: Sequence[int]) -> None:
        """Completions that ended give their blocks back, children before their parent."""
        for seq_id in reversed(seq_ids):
            if place := self._places.pop(seq_id, None):
                self._trace(place.completion)
            self.scheduler.finish(seq_id)
            self.cache.unassign(seq_id)

    def _trace(self, completion: CompletionState) -> None:
        """Keep what the scheduler and the cache know of a sequence that ends. One the scheduler ended is gone."""
        if (seq := self.scheduler.find(completion.seq_id)) is None:
            return
        physical, logical = self.cache.sequence_bytes(completion.seq_id)
        completion.trace = CompletionTrace(
            waits=tuple(map(str, seq.waits)),
            preemptions=tuple(map(str, seq.preemptions)),
            cached_tokens=seq.cached_tokens or 0,
            physical_bytes=physical,
            logical_bytes=logical,
            prefix=self.cache.prefix_reason(completion.seq_id),
            bytes_by_format=tuple(self.cache.bytes_by_format(completion.seq_id).items()),
        )

    def _score_prompt(self, row: Row, place: _Place, run: StepRun, span: int) -> None:
        """Row start + j predicts prompt token start + j + 1; what a preemption repeats is not scored again."""
        request, top = place.request, place.request.params.prompt_logprobs or 0
        if len(request.prompt_logprobs) == len(request.prompt_ids) - 1:
            return
        end = min(row.start + row.n_tokens, len(request.prompt_ids) - 1)
        for logits, at in run.span_logits(span, end - row.start):
            for j, line in enumerate(logits):
                target = row.start + at + j + 1
                if target not in request.prompt_logprobs:
                    request.prompt_logprobs[target] = token_logprob(line, request.prompt_ids[target], top)

    def _result(self, plan: StepPlan, begun: float) -> StepResult:
        deltas, self._pending = tuple(self._pending), []
        done = [r for d in deltas if d.finish_reason and (r := self._requests.get(d.request_id)) and r.done]
        finished = tuple(self._ended(self._requests.pop(r.request_id)) for r in dict.fromkeys(done))
        return StepResult(deltas, finished, plan, self._clock() - begun)

    def _ended(self, request: RequestState) -> RequestOutput:
        output = request.output()
        if self.verifier is not None and isinstance(request.watch, Watched):
            self.verifier.settle(request.watch, output)
        return output
