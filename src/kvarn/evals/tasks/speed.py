"""Decode speed and memory after a prompt: measured for every choice, whatever else is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvarn.evals.tasks._windows import windows
from kvarn.evals.tasks.base import Bench, Settings, Task, Value

NEW_TOKENS = 33


@dataclass(frozen=True)
class Speed(Task):
    """Tokens a second of greedy decoding after a prompt of context_tokens, and the bytes that the sequence holds then
    for each token of its text."""

    shown: ClassVar[tuple[str, ...]] = ("decode_tokens_per_s",)
    reads: ClassVar[tuple[str, ...]] = ("text", "context_tokens", "stride_tokens")

    def context_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return settings.context_tokens + NEW_TOKENS

    def cost_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return settings.context_tokens + NEW_TOKENS

    def run(self, bench: Bench, settings: Settings) -> Sequence[Value]:
        prompt, rest = next(windows(bench.tokenizer, settings))
        rate = bench.scorer.decode([*prompt, *rest], NEW_TOKENS)
        usage = bench.scorer.usages[-1]
        return [
            Value("decode_tokens_per_s", rate, NEW_TOKENS - 1),
            Value("held_bytes_per_token", usage.held_bytes / usage.tokens, usage.tokens),
        ]


TASK = Speed()
