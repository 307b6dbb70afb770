"""Perplexity of a text that goes on far past the trained context."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvarn.evals.tasks.base import Bench, Settings, Task, Value, perplexity

PROMPT_TOKENS = 64
PARTS = 16


@dataclass(frozen=True)
class Stream(Task):
    """One pass over a text of stream_tokens (None: four times the trained context), read as if it were generated, as
    in StreamingLLM (Xiao et al. 2023, arXiv 2309.17453, section 4.1). `perplexity_within`: of the part inside the
    trained context, `perplexity_end`: of the last sixteenth; `perplexity_part` by sixteenths."""

    shown: ClassVar[tuple[str, ...]] = ("perplexity_within", "perplexity_end")
    reads: ClassVar[tuple[str, ...]] = ("text", "stream_tokens")

    def context_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return self.cost_tokens(settings, trained_tokens) + 1

    def cost_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return settings.stream_tokens or 4 * trained_tokens

    def run(self, bench: Bench, settings: Settings) -> Sequence[Value]:
        total = self.cost_tokens(settings, bench.trained_tokens)
        text = bench.tokenizer.encode(settings.text)
        ids = [text[i % len(text)] for i in range(total)]
        found = bench.scorer.score(ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]).logprobs.tolist()
        within = found[: max(1, bench.trained_tokens - PROMPT_TOKENS)]
        edges = [len(found) * i // PARTS for i in range(PARTS + 1)]
        parts = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
        values = [
            Value(
                "perplexity_part", perplexity(found[a:b]), b - a, {"from": a + PROMPT_TOKENS, "to": b + PROMPT_TOKENS}
            )
            for a, b in parts
        ]
        begin, end = parts[-1]
        return [
            Value("perplexity_within", perplexity(within), len(within)),
            Value("perplexity_end", perplexity(found[begin:end]), end - begin),
            *values,
        ]


TASK = Stream()
