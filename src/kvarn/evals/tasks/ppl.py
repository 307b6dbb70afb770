"""Strided perplexity of a text, read through the cache as while decoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvarn.evals.tasks._windows import windows
from kvarn.evals.tasks.base import Bench, Settings, Task, Value, perplexity


@dataclass(frozen=True)
class Perplexity(Task):
    """exp of the mean negative log-likelihood of the last stride_tokens of each window of context_tokens. Its samples
    are the windows' means, in nats a token."""

    shown: ClassVar[tuple[str, ...]] = ("perplexity",)
    reads: ClassVar[tuple[str, ...]] = ("text", "context_tokens", "stride_tokens", "windows")

    def context_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return settings.context_tokens + 1

    def cost_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return settings.windows * settings.context_tokens

    def run(self, bench: Bench, settings: Settings) -> Sequence[Value]:
        found = [bench.scorer.score(*window).logprobs.tolist() for window in windows(bench.tokenizer, settings)]
        tokens = list(itertools.chain(*found))
        value, nats = perplexity(tokens), [-sum(window) / len(window) for window in found]
        return [Value("perplexity", value, len(tokens), samples=nats, slope=value)]


TASK = Perplexity()
