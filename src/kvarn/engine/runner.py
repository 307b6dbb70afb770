"""Runs the model over one ragged step and hands out its logits, only for the rows that are wanted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvarn.kv.manager import CacheManager
from kvarn.kv.recompute import RecomputeCache
from kvarn.kv.step import CacheStep, Span
from kvarn.kv.view import StepInputs
from kvarn.models.base import CausalLM

LOGIT_ROWS = 64  # of a prompt at once: a large vocabulary's logits take a megabyte a row


@dataclass(frozen=True, slots=True)
class StepRun:
    """Hidden states [R, hidden] of the rows that are read, the last ones of each span; query_start [S + 1] tells whose
    they are."""

    model: CausalLM
    hidden: Tensor
    query_start: tuple[int, ...]

    def last_logits(self, spans: Sequence[int]) -> Tensor:
        """Logits [len(spans), V] float32 of these spans' last rows, which must have been read."""
        if not spans:
            return self.hidden.new_zeros((0, 1)).float()
        rows = [self.query_start[s + 1] - 1 for s in spans]
        with torch.inference_mode():
            whole = rows == list(range(len(self.hidden)))
            return self.model.logits(self.hidden if whole else self.hidden[rows])

    def rows(self, span: int) -> Tensor:
        """The span's hidden states [rows that are read, hidden]."""
        return self.hidden[self.query_start[span] : self.query_start[span + 1]]

    def span_logits(self, span: int, n_rows: int) -> Iterator[tuple[Tensor, int]]:
        """(logits [r, V], index of the first row within the span) for the span's first n_rows, a few at a time."""
        begin = self.query_start[span]
        for at in range(0, n_rows, LOGIT_ROWS):
            rows = self.hidden[begin + at : begin + min(at + LOGIT_ROWS, n_rows)]
            with torch.inference_mode():
                yield self.model.logits(rows), at


class LayeredRun:
    """One span that goes through the layers in several steps, beside others' steps. Its slots hold what the layers so
    far wrote; nothing of it counts before the last layer."""

    def __init__(
        self,
        model: CausalLM,
        cache: CacheManager | RecomputeCache,
        span: Span,
        tokens: Sequence[int],
        reach_tokens: int,
    ) -> None:
        self.span, self._model, self._cache, self._done_layers = span, model, cache, 0
        self._kv = cache.begin_step([span])
        self._inputs = _inputs(cache, self._kv, tokens, np.full(len(tokens), reach_tokens, np.int64))
        self._x: Tensor | None = None

    def go_on(self, to_layer: int) -> StepRun | None:
        """Through the layers before to_layer. The run once all are done, else None."""
        every = len(self._model.layers)
        with torch.inference_mode():
            x = self._model.forward_layers(self._x, self._inputs, self._kv, range(self._done_layers, to_layer))
            self._x, self._done_layers = x, to_layer
            if to_layer < every:
                return None
            self._cache.settle(self._kv)
        return StepRun(self._model, x, (0, self.span.n_tokens))


def run_model(
    model: CausalLM,
    cache: CacheManager | RecomputeCache,
    spans: Sequence[Span],
    tokens: Sequence[Sequence[int]],
    reach_tokens: Sequence[int],
    read_tokens: Sequence[int] | None = None,
) -> StepRun:
    """tokens: each span's token ids. reach_tokens: the length each span's sequence may reach. read_tokens: of how many
    of each span's last tokens the hidden states are read; None: of all."""
    counts = [s.n_tokens for s in spans]
    read = counts if read_tokens is None else read_tokens
    with torch.inference_mode():
        kv = cache.begin_step(spans)
        ids = list(itertools.chain.from_iterable(tokens))
        inputs = _inputs(cache, kv, ids, np.repeat(np.array(reach_tokens, np.int64), counts))
        if read != counts:
            inputs = replace(inputs, read_rows=_last_rows(counts, read))
        hidden = model.forward(inputs, kv)
        cache.settle(kv)
    return StepRun(model, hidden, tuple(itertools.accumulate(read, initial=0)))


def _inputs(
    cache: CacheManager | RecomputeCache, kv: CacheStep, token_ids: Sequence[int], reach_tokens: np.ndarray
) -> StepInputs:
    """reach_tokens [T]: for each row, the length its sequence may reach."""
    return StepInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=kv.positions,
        kernels=cache.backend,
        span_tokens=torch.from_numpy(reach_tokens),
    )


def _last_rows(counts: Sequence[int], read: Sequence[int]) -> Tensor:
    """The last read[s] of each span's counts[s] rows, one span after the other -> [R] int64."""
    ends = itertools.accumulate(counts)
    rows = (range(end - n, end) for end, n in zip(ends, read, strict=True))
    return torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=torch.int64)
