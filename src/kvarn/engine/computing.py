"""A step's rows through the model, up to the chosen tokens. What goes wrong for one row is that row's error alone.

A forward pass that raises is undone and tried again in halves, so that only what cannot be computed by itself fails;
rows do not see each other, so the others get the numbers that they would have got.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvarn.engine.request import CompletionState, RequestState
from kvarn.engine.runner import LayeredRun, StepRun, run_model
from kvarn.engine.sampler import Sampled, SampleRow, sample, token_logprob
from kvarn.engine.step_plan import Layers, Row
from kvarn.kv.manager import CacheManager
from kvarn.kv.recompute import RecomputeCache
from kvarn.kv.step import Span
from kvarn.models.base import CausalLM

Cache = CacheManager | RecomputeCache


@dataclass(frozen=True, slots=True)
class Place:
    """Which completion of which request a sequence is."""

    request: RequestState
    completion: CompletionState


@dataclass(slots=True)
class RowResult:
    """What a row brought. fed: its tokens. sampled: its own next token and the first one of each of its children.
    error: why it brought nothing."""

    row: Row
    fed: list[int]
    sampled: list[Sampled] = field(default_factory=list)
    error: Exception | None = None

    @property
    def span(self) -> Span:
        return Span(self.row.seq_id, self.row.start, self.row.n_tokens)


class Computing:
    """places: of all living sequences. tokens_of: a sequence's tokens so far. miscounted: sequences whose attention
    mass counts a failed attempt; whoever empties it sees to it that they are computed again."""

    def __init__(
        self,
        model: CausalLM,
        cache: Cache,
        places: Mapping[int, Place],
        tokens_of: Callable[[int], list[int]],
    ) -> None:
        self._model, self._cache, self._places, self._tokens_of = model, cache, places, tokens_of
        self.miscounted: set[int] = set()
        self._layered: dict[int, LayeredRun] = {}

    def compute(self, rows: Sequence[Row]) -> list[RowResult]:
        """One result for each row that is complete or has an error, in their order. Nothing is committed; what has an
        error is undone. Where it is interrupted (any other exception than an Exception), nothing of the step counts,
        nor of what went through some layers before."""
        results = [RowResult(r, self._tokens_of(r.seq_id)[r.start : r.start + r.n_tokens]) for r in rows]
        try:
            if whole := [r for r in results if r.row.layers is None]:
                self._forward(whole)
            for result in results:
                if result.row.layers is not None:
                    self._forward_layers(result, result.row.layers)
        except BaseException:
            for result in results:
                self.forget(result.row.seq_id)
            self.undo(results)
            raise
        if failed := [r for r in results if r.error is not None]:
            self.undo(failed)
        return [r for r in results if r.row.complete or r.error is not None]

    def forget(self, seq_id: int) -> None:
        """The sequence has given its blocks back: what went through some layers is gone."""
        self._layered.pop(seq_id, None)

    def undo(self, results: Sequence[RowResult]) -> None:
        """What these rows wrote is gone."""
        self.miscounted.update(self._cache.abort_step([r.span for r in results]))

    def _forward(self, results: Sequence[RowResult]) -> None:
        try:
            run = self._run(results)
        except Exception as error:
            self.undo(results)
            if len(results) == 1:
                results[0].error = error
                return
            half = len(results) // 2
            self._forward(results[:half])
            self._forward(results[half:])
            return
        self._choose(results, run)

    def _forward_layers(self, result: RowResult, layers: Layers) -> None:
        """Go on with a chunk, or begin it: also where the step that began it was interrupted."""
        seq_id, span = result.row.seq_id, result.span
        try:
            layered = self._layered.pop(seq_id, None)
            if layered is None or layered.span != span:
                reach = _reach(self._places[seq_id].request)
                layered = LayeredRun(self._model, self._cache, span, result.fed, reach)
            run = layered.go_on(layers.end)
        except Exception as error:
            result.error = error
            return
        if run is None:
            self._layered[seq_id] = layered
        else:
            self._choose([result], run)

    def _run(self, results: Sequence[RowResult]) -> StepRun:
        reach = [_reach(self._places[r.row.seq_id].request) for r in results]
        read = [self._read_tokens(r.row) for r in results]
        return run_model(self._model, self._cache, [r.span for r in results], [r.fed for r in results], reach, read)

    def _read_tokens(self, row: Row) -> int:
        """Of how many of the row's last tokens `_choose` reads the hidden states."""
        place = self._places[row.seq_id]
        if place.request.params.prompt_logprobs is not None or place.request.watch is not None:
            return row.n_tokens
        return int(row.samples)

    def _choose(self, results: Sequence[RowResult], run: StepRun) -> None:
        """Read all that is wanted of the hidden states before anything is committed: prompt log-probabilities, then the
        next token of each row that samples, and the first one of each of its children."""
        wanted: list[tuple[int, RowResult, list[SampleRow]]] = []
        for at, result in enumerate(results):
            try:
                self._read(result.row, run, at)
                if result.row.samples:
                    wanted.append((at, result, self._sample_rows(result.row)))
            except Exception as error:
                result.error = error
        if wanted:
            self._sample(wanted, run)

    def _sample_rows(self, row: Row) -> list[SampleRow]:
        places = (self._places[s] for s in (row.seq_id, *row.children))
        return [place.request.sample_row(place.completion) for place in places]

    def _sample(self, wanted: Sequence[tuple[int, RowResult, list[SampleRow]]], run: StepRun) -> None:
        try:
            logits = run.last_logits([at for at, _, rows in wanted for _ in rows])
            chosen = iter(sample(logits, [row for _, _, rows in wanted for row in rows]))
        except Exception as error:
            if len(wanted) == 1:
                wanted[0][1].error = error
                return
            for each in wanted:
                self._sample([each], run)
            return
        for _, result, rows in wanted:
            result.sampled = [next(chosen) for _ in rows]

    def _read(self, row: Row, run: StepRun, at: int) -> None:
        place = self._places[row.seq_id]
        if place.request.params.prompt_logprobs is not None:
            _score_prompt(row, place.request, run, at)
        if place.request.watch is not None and place.completion.index == 0:
            place.request.watch(row.start, run.rows(at))


def _reach(request: RequestState) -> int:
    return len(request.prompt_ids) + request.params.max_tokens


def _score_prompt(row: Row, request: RequestState, run: StepRun, span: int) -> None:
    """Row start + j predicts prompt token start + j + 1; what a preemption repeats is not scored again."""
    top = request.params.prompt_logprobs or 0
    if len(request.prompt_logprobs) == len(request.prompt_ids) - 1:
        return
    end = min(row.start + row.n_tokens, len(request.prompt_ids) - 1)
    for logits, at in run.span_logits(span, end - row.start):
        for j, line in enumerate(logits):
            target = row.start + at + j + 1
            if target not in request.prompt_logprobs:
                request.prompt_logprobs[target] = token_logprob(line, request.prompt_ids[target], top)
