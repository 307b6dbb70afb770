"""A request inside the engine: its completions, their tokens and texts, its clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvarn.core.requests import (
    Completion,
    CompletionTrace,
    Delta,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    TokenLogprob,
)
from kvarn.engine.guide import Guide
from kvarn.engine.randomness import fresh_seed
from kvarn.engine.sampler import Sampled, SampleRow
from kvarn.text import TextStream, Tokenizer

Watch = Callable[[int, Tensor], None]  # (position of the first row, hidden states [n, hidden]) of each computed chunk


@dataclass(slots=True, eq=False)
class CompletionState:
    """One of a request's n answers while it grows. pieces: the text that was certain so far."""

    index: int
    seq_id: int
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    guide: Guide | None = None
    trace: CompletionTrace | None = None

    def result(self, want_logprobs: bool) -> Completion:
        return Completion(
            self.index,
            "".join(self.pieces),
            tuple(self.token_ids),
            self.finish_reason or "error",
            tuple(self.logprobs) if want_logprobs else None,
            self.error,
            self.trace,
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """One request while it lives. seed: the request's own, or a fresh one. watch: sees the hidden states of its rows,
    again where a preemption repeats them. Times are on the engine's clock."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    completions: list[CompletionState]
    arrival_s: float
    seed: int = 0
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int = 0
    prompt_counts: Counter[int] = field(default_factory=Counter)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    watch: Watch | None = None

    @classmethod
    def new(
        cls,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        first_seq_id: int,
        now_s: float,
        guide: Guide | None = None,
    ) -> RequestState:
        """seq ids first_seq_id .. first_seq_id + n - 1. guide: at its start; each completion follows a copy."""
        completions = [CompletionState(i, first_seq_id + i, tokenizer.stream(params.stop)) for i in range(params.n)]
        if guide is not None:
            for completion in completions:
                completion.guide = guide.fork()
        state = cls(request_id, tuple(prompt_ids), params, completions, now_s)
        state.seed = params.seed if params.seed is not None else fresh_seed()
        if params.repetition_penalty != 1:
            state.prompt_counts = Counter(prompt_ids)
        return state

    @property
    def done(self) -> bool:
        return all(c.finish_reason is not None for c in self.completions)

    def sample_row(self, completion: CompletionState) -> SampleRow:
        """What the sampler must know to choose the completion's next token."""
        position = len(self.prompt_ids) + len(completion.token_ids)
        allowed = completion.guide.allowed() if completion.guide is not None else None
        return SampleRow(
            self.params, self.seed, completion.index, position, self.prompt_counts, completion.counts, allowed
        )

    def take(self, completion: CompletionState, sampled: Sampled, end_ids: frozenset[int], now_s: float) -> Delta:
        """Append a chosen token; decides whether the completion ends, and which text is certain now."""
        token, p = sampled.token_id, self.params
        ended = token in p.stop_token_ids or (token in end_ids and not p.ignore_eos)
        text = "" if ended else completion.stream.push((token,))
        if not ended and completion.guide is not None:
            completion.guide.accept(token)
            completion.error = completion.guide.error
        self.first_token_s = now_s if self.first_token_s is None else self.first_token_s
        self.last_token_s = now_s
        completion.token_ids.append(token)
        completion.counts[token] += 1
        if sampled.logprob is not None:
            completion.logprobs.append(sampled.logprob)
        if completion.error is not None:
            completion.finish_reason = "error"
        elif ended or completion.stream.stopped_by is not None or (completion.guide and completion.guide.done):
            completion.finish_reason = "stop"
        elif len(completion.token_ids) >= p.max_tokens:
            completion.finish_reason = "length"
        if completion.finish_reason is not None:
            text += completion.stream.finish()
        completion.pieces.append(text)
        logprobs = (sampled.logprob,) if sampled.logprob is not None else ()
        return Delta(self.request_id, completion.index, text, (token,), completion.finish_reason, logprobs)

    def end(self, completion: CompletionState, reason: str, error: str | None = None) -> Delta:
        """End a completion from outside: 'cancelled' or 'error'. What was held back of its text comes out, unless that
        is what fails: an end never does."""
        completion.finish_reason, completion.error = reason, error
        try:
            text = completion.stream.finish()
        except Exception:
            text = ""
        completion.pieces.append(text)
        return Delta(self.request_id, completion.index, text, (), reason)

    def output(self) -> RequestOutput:
        wanted = self.params.logprobs is not None
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = tuple(self.prompt_logprobs.get(i) for i in range(len(self.prompt_ids)))
        return RequestOutput(
            self.request_id,
            self.prompt_ids,
            tuple(c.result(wanted) for c in self.completions),
            self.timings(),
            self.cached_tokens,
            prompt_logprobs,
        )

    def timings(self) -> RequestTimings:
        started = self.arrival_s if self.started_s is None else self.started_s
        first = started if self.first_token_s is None else self.first_token_s
        last = first if self.last_token_s is None else self.last_token_s
        return RequestTimings(
            queue_s=started - self.arrival_s,
            prefill_s=first - started,
            ttft_s=first - self.arrival_s,
            decode_s=last - first,
        )
