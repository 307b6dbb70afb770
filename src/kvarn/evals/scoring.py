"""Scores texts through a cache as it is while decoding: teacher forcing, one sequence at a time.

What is scored is *replayed*: its tokens go through the engine as if they had been generated. Within a block nothing is
sealed or dropped while decoding, so a replay in chunks that end at block boundaries sees exactly the cache that
decoding token by token sees, at the speed of a prefill. Where a policy drops single tokens of a cache that is sealed,
rows grow unevenly and seal at any token: there the replay goes token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.core.errors import InvalidRequest, KvarnError
from kvarn.core.requests import SamplingParams
from kvarn.engine.engine import Engine

Tick = Callable[[int], None]  # so many tokens more were computed
LOGIT_ROWS = 64
KNOWN_TOKENS = 8192  # whose hidden states are kept for another task that reads the same text


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each scored token: its log-probability (nats) before it was seen [n], and whether it was the likeliest [n]."""

    logprobs: Tensor
    hits: Tensor

    @property
    def mean_logprob(self) -> float:
        return float(self.logprobs.mean())

    @property
    def exact(self) -> bool:
        """Greedy decoding would have given these very tokens: each is the likeliest after those before it."""
        return bool(self.hits.all())


@dataclass(frozen=True, slots=True)
class Usage:
    """What one sequence took. held_bytes: at its end, after the policy decided; peak_bytes: at its fullest moment, the
    prompt's prefill included. tokens: of its text."""

    tokens: int
    held_bytes: int
    peak_bytes: int


Known = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Tensor, Usage]]  # prompt and replayed -> hidden states


class Scorer:
    """One engine, used for one sequence at a time. `usages`: what each took, since someone emptied the list. known:
    what the same cache choice gave before, in this engine or another, which is not computed again; None: everything
    is."""

    def __init__(self, engine: Engine, tick: Tick = lambda tokens: None, known: Known | None = None) -> None:
        self.engine, self._tick = engine, tick
        self._known = known
        self._ids = itertools.count()
        self.usages: list[Usage] = []

    def score(self, prompt: Sequence[int], replayed: Sequence[int], scored: int | None = None) -> Scores:
        """Feed `prompt`, then `replayed`, and score the last `scored` tokens (None: all that are replayed). The cache's
        policy decides when the prompt is complete, so it has not seen what is replayed. Raises InvalidRequest for an
        empty prompt or replay, DoesNotFit."""
        wanted = len(replayed) if scored is None else scored
        hidden = self.hidden(prompt, replayed)[len(replayed) - wanted :]
        targets = torch.tensor(list(replayed)[len(replayed) - wanted :])
        parts = [self._lines(h, t) for h, t in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)]
        return Scores(torch.cat([p for p, _ in parts]), torch.cat([h for _, h in parts]))

    def _lines(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = self.log_softmax(hidden)
        return logprobs.gather(1, targets[:, None])[:, 0].double(), logprobs.argmax(-1) == targets

    def log_softmax(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> log-probabilities [n, V] float32."""
        with torch.inference_mode():
            return torch.log_softmax(self.engine.model.logits(hidden), dim=-1)

    def hidden(self, prompt: Sequence[int], replayed: Sequence[int]) -> Tensor:
        """The hidden states [n, hidden] that predict each of the n replayed tokens."""
        if self._known is None:
            return self._hidden(prompt, replayed)
        text = tuple(prompt), tuple(replayed)
        if text not in self._known:
            hidden = self._hidden(prompt, replayed)
            if len(replayed) + sum(len(h) for h, _ in self._known.values()) <= KNOWN_TOKENS:
                self._known[text] = hidden, self.usages[-1]
            return hidden
        hidden, usage = self._known[text]
        self.usages.append(usage)
        return hidden

    def _hidden(self, prompt: Sequence[int], replayed: Sequence[int]) -> Tensor:
        if not len(prompt) or not len(replayed):
            raise InvalidRequest("nothing to score", fixes=("give a prompt and at least one token to score",))
        first, rows = len(prompt) - 1, {}

        def watch(start: int, states: Tensor) -> None:
            skip = max(0, first - start)
            for at, line in enumerate(states[skip:], start + skip):
                rows[at] = line.clone()

        params = SamplingParams(max_tokens=1, ignore_eos=True)
        self._run([*prompt, *replayed], params, watch=watch, replayed_tokens=len(replayed))
        return torch.stack([rows[at] for at in range(first, first + len(replayed))])

    def decode(self, prompt: Sequence[int], new_tokens: int) -> Iterator[float]:
        """Generate greedily; yields the seconds of each of the new_tokens - 1 decode steps. The prompt, with which the
        first token comes, is computed before the first of them."""
        steps = self._steps(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        return (seconds for seconds, generated in steps if generated > 1)

    def _run(self, ids: Sequence[int], params: SamplingParams, **how: object) -> None:
        """Run one request to its end, noting what it took."""
        for _ in self._steps(ids, params, **how):
            pass

    def _steps(self, ids: Sequence[int], params: SamplingParams, **how: object) -> Iterator[tuple[float, int]]:
        """Run one request step by step: the seconds that each took, and how many tokens are generated by then. What it
        took is noted before the last one is told."""
        request_id = f"eval-{next(self._ids)}"
        cache = self.engine.cache
        cache.reset_peak()
        state = self.engine.add_request(request_id, ids, params, **how)  # pyright: ignore[reportArgumentType]
        running, held = state.completions[0], 0
        while True:
            held = cache.sequence_bytes(running.seq_id)[0] or held
            result = self.engine.step()
            self._tick(sum(r.new_tokens for r in result.plan.rows))
            if result.finished:
                break
            yield result.duration_s, len(running.token_ids)
        (output,) = result.finished
        completion = output.completions[0]
        if completion.error is not None:
            raise KvarnError(completion.error)
        if completion.trace is not None:
            held = completion.trace.physical_bytes or held
        usage = Usage(len(ids) + len(completion.token_ids) - 1, held, cache.peak.physical_bytes)
        self.usages.append(usage)
        yield result.duration_s, len(completion.token_ids)
