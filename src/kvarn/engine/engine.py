"""The engine: `step` is the map of the project. Schedule, build, run, sample, commit, emit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index

from kvarn.core.cache_params import CacheParams
from kvarn.core.errors import InvalidRequest
from kvarn.core.requests import CompletionTrace, Delta, RequestOutput, SamplingParams
from kvarn.engine.computing import Cache, Computing, Place, RowResult
from kvarn.engine.guide import Guide
from kvarn.engine.request import CompletionState, RequestState, Watch
from kvarn.engine.rereading import Reading, read_again_where_due
from kvarn.engine.scheduler import Scheduler
from kvarn.engine.sequence import Entry
from kvarn.engine.step_plan import Row, StepPlan
from kvarn.engine.verify import Verifier, Watched
from kvarn.kv.manager import CacheManager
from kvarn.kv.policies.base import KVPolicy
from kvarn.kv.settling import policy_for
from kvarn.models.base import CausalLM
from kvarn.text import Tokenizer

log = logging.getLogger("kvarn.engine")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: pieces of answers, and the requests that are finished. failures: request id and error of
    those among them for which something raised."""

    deltas: tuple[Delta, ...]
    finished: tuple[RequestOutput, ...]
    plan: StepPlan
    duration_s: float
    failures: tuple[tuple[str, Exception], ...] = ()


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
        self._places: dict[int, Place] = {}
        self._readings: dict[int, Reading] = {}
        self._next_seq_id = 0
        self._pending: list[Delta] = []
        self._failures: list[tuple[str, Exception]] = []
        self._computing = Computing(model, cache, self._places, lambda seq_id: scheduler.sequence(seq_id).tokens)

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
        patient: bool = False,
    ) -> RequestState:
        """Queue a request. deadline_s: seconds from now. guide: constrains the answers. cache: its choice of cache;
        policy: decides over blocks, where `cache` does not say so. None: the engine's own. watch: is told the
        hidden states of its rows, those of its first answer. replayed_tokens: the last tokens of the prompt that go
        through the cache as if they had been generated. patient: only its end is waited for. Raises
        InvalidRequest, DoesNotFit and IncompatiblePlan, and then nothing has changed.
        """
        prompt_ids = self._checked(request_id, prompt_ids, params)
        policy = policy or self.policy
        if cache is not None:
            policy = policy_for(cache, self.cache.plan, policy)
        finds, leaves = self.cache.prefix_roles(policy)
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
            finds_prefix=finds,
            leaves_prefix=leaves,
            replayed_tokens=replayed_tokens,
            by_layers=policy is None or not policy.signals,
            stepwise=policy is not None and policy.decides,
            token_by_token=policy is not None and policy.rewrites and any(g.home for g in self.cache.plan.groups),
            block_tokens=self.cache.plan.block_size,
            patient=patient,
        )
        state.watch = self.verifier.watch(prompt_ids, state.seed) if self.verifier and watch is None else watch
        self._enter(entry, policy)
        self._next_seq_id += params.n
        self._requests[request_id] = state
        for completion in state.completions:
            self._places[completion.seq_id] = Place(state, completion)
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
        self._forget(completion.seq_id)
        self._places.pop(completion.seq_id, None)
        self.cache.unassign(completion.seq_id)
        self._pending.append(state.end(completion, reason, error))

    def _forget(self, seq_id: int) -> None:
        """What was begun for it and is not in the cache."""
        self._computing.forget(seq_id)
        self._readings.pop(seq_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def request(self, request_id: str) -> RequestState:
        """A living request, to read. KeyError where it is unknown or done."""
        return self._requests[request_id]

    # -- a step ---------------------------------------------------------------------------------------------------
    def step(self) -> StepResult:
        """One step over all that run. A request for which something fails ends with that error; the others go on."""
        begun = self._clock()
        plan = self.scheduler.schedule(begun)
        for preempted in plan.preempted:
            self._forget(preempted.seq_id)
        for ended in plan.ended:
            if place := self._places.get(ended.seq_id):
                self._end(place.request, place.completion, "error", str(ended))
        for admitted in plan.admitted:
            if place := self._places.get(admitted.seq_id):
                place.request.started_s = begun if place.request.started_s is None else place.request.started_s
                place.request.cached_tokens = max(place.request.cached_tokens, admitted.cached_tokens)
        if plan.rows or plan.again:
            try:
                self._compute(plan.rows)
                self._read_again(plan.again)
            finally:
                self._recount()
            if self.scheduler.pace is not None and not self._failures:
                self.scheduler.pace.note((*plan.rows, *plan.again), self._clock() - begun)
        return self._result(plan, begun)

    def _compute(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        results = self._computing.compute(rows)
        for result in results:
            if result.error is not None:
                self._fail(result.row.seq_id, result.error)
        self._commit([r for r in results if r.row.seq_id in self._places])
        now = self._clock()
        for result in results:
            if result.row.seq_id in self._places:
                self._guarded(result.row.seq_id, lambda r=result: self._take(r, now))

    def _commit(self, results: Sequence[RowResult]) -> None:
        """The computed tokens stay in the cache; what is full comes to rest, and policies decide."""
        for seq_id in self.cache.commit_step([r.span for r in results], [r.fed for r in results]):
            if seq_id in self._places:
                self._guarded(seq_id, lambda s=seq_id: self._settle(s))

    def _settle(self, seq_id: int) -> None:
        self.cache.come_to_rest(seq_id)
        if seq_id in self._computing.miscounted:
            return
        if isinstance(self.cache, CacheManager) and self.cache.wants_rereading(seq_id):
            if not self.scheduler.sequence(seq_id).children:
                self._readings[seq_id] = reading = Reading(self.model, self.cache, seq_id, self.tokenizer)
                self.scheduler.read_again(seq_id, reading.part_tokens)
                return
            # further completions fork from it in this step, after what its policy decided
            read_again_where_due(self.model, self.cache, seq_id, self.tokenizer)
        self._decide(seq_id)

    def _decide(self, seq_id: int) -> None:
        if decision := self.cache.decide(seq_id):
            self.cache.apply(seq_id, decision)

    def _read_again(self, rows: Sequence[Row]) -> None:
        """Go on with texts that are read again; a policy decides when its text was read to the end."""
        for row in rows:
            if row.seq_id in self._readings:
                self._guarded(row.seq_id, lambda r=row: self._read_part(r))

    def _read_part(self, row: Row) -> None:
        if self._readings[row.seq_id].go_on(None if row.complete or row.layers is None else row.layers.end):
            del self._readings[row.seq_id]
            self._decide(row.seq_id)

    def _recount(self) -> None:
        """Where attention mass counts what did not happen, the sequence is computed again."""
        for seq_id in self._computing.miscounted & self._places.keys():
            self.scheduler.restart(seq_id)
            self._forget(seq_id)
        self._computing.miscounted.clear()

    def _guarded(self, seq_id: int, work: Callable[[], None]) -> None:
        """Do something for one sequence; where it raises, its request ends."""
        try:
            work()
        except Exception as error:
            self._fail(seq_id, error)

    def _fail(self, seq_id: int, error: Exception) -> None:
        """End the sequence's request with all its completions."""
        if (place := self._places.get(seq_id)) is None:
            return
        self._failures.append((place.request.request_id, error))
        for completion in place.request.completions:
            if completion.finish_reason is None:
                self._end(place.request, completion, "error", f"{type(error).__name__}: {error}")

    def _take(self, result: RowResult, now_s: float) -> None:
        """The chosen tokens of a row go to their completions, which may end with them."""
        row, ended = result.row, list[int]()
        try:
            if not row.samples:
                self.scheduler.advance(row.seq_id, row.n_tokens)
            for seq_id, got in zip((row.seq_id, *row.children), result.sampled, strict=row.samples):
                place = self._places[seq_id]
                delta = place.request.take(place.completion, got, self.tokenizer.end_ids, now_s)
                self._pending.append(delta)
                if delta.finish_reason is not None:
                    ended.append(seq_id)
                if seq_id == row.seq_id:
                    self.scheduler.advance(seq_id, row.n_tokens, delta.token_ids)
                else:
                    self.scheduler.fork(seq_id, delta.token_ids)
        finally:
            self._close(ended)

    def _close(self, seq_ids: Sequence[int]) -> None:
        """Completions that ended give their blocks back, children before their parent."""
        for seq_id in reversed(seq_ids):
            if place := self._places.pop(seq_id, None):
                self._trace(place.completion)
            self._readings.pop(seq_id, None)
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

    def _result(self, plan: StepPlan, begun: float) -> StepResult:
        deltas, self._pending = tuple(self._pending), []
        failures, self._failures = tuple(self._failures), []
        done = [r for d in deltas if d.finish_reason and (r := self._requests.get(d.request_id)) and r.done]
        finished = tuple(self._ended(self._requests.pop(r.request_id)) for r in dict.fromkeys(done))
        return StepResult(deltas, finished, plan, self._clock() - begun, failures)

    def _ended(self, request: RequestState) -> RequestOutput:
        output = request.output()
        if self.verifier is not None and isinstance(request.watch, Watched):
            try:
                self.verifier.settle(request.watch, output)
            except Exception:
                log.exception("request %s could not be verified", output.request_id)
        return output
