"""Decode speed and memory after a prompt: measured for every choice, whatever else is asked."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvarn.evals.tasks._windows import windows
from kvarn.evals.tasks.base import Bench, Settings, Task, Value

WARM_STEPS = 2  # not counted: the first ones of a process take longer
TURN_STEPS = 6
TURNS = 5
NEW_TOKENS = 1 + WARM_STEPS + TURNS * TURN_STEPS  # the first token comes with the prompt


@dataclass(frozen=True)
class Speed(Task):
    """Tokens a second of greedy decoding after a prompt of context_tokens: one over the median duration of a step; and
    the bytes that the sequence holds then for each token of its text. The choices take turns of TURN_STEPS steps, so
    that what else the machine does in the meantime meets all of them alike."""

    shown: ClassVar[tuple[str, ...]] = ("decode_tokens_per_s",)
    reads: ClassVar[tuple[str, ...]] = ("text", "context_tokens", "stride_tokens")
    paired: ClassVar[bool] = False

    def context_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return settings.context_tokens + NEW_TOKENS

    def cost_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return settings.context_tokens + NEW_TOKENS

    def run(self, bench: Bench, settings: Settings) -> Sequence[Value]:
        return self.together([bench], settings)[0]

    def together(self, benches: Sequence[Bench], settings: Settings) -> list[Sequence[Value]]:
        """The values of each choice, measured turn by turn."""
        prompt = [*itertools.chain(*next(windows(benches[0].tokenizer, settings)))]
        decoding = [bench.scorer.decode(prompt, NEW_TOKENS) for bench in benches]
        for steps in decoding:
            _ = [*itertools.islice(steps, WARM_STEPS)]
        turns: list[list[list[float]]] = [[] for _ in benches]
        for steps_of_turn in [TURN_STEPS] * (TURNS - 1) + [None]:  # the last turn goes to the end
            for mine, steps in zip(turns, decoding, strict=True):
                mine.append(list(itertools.islice(steps, steps_of_turn)))
        return [_values(bench, mine) for bench, mine in zip(benches, turns, strict=True)]


def _values(bench: Bench, turns: Sequence[Sequence[float]]) -> Sequence[Value]:
    """turns: the seconds of each step."""
    steps, usage = [*itertools.chain(*turns)], bench.scorer.usages[-1]
    rates = [1 / statistics.median(turn) for turn in turns]
    return [
        Value("decode_tokens_per_s", 1 / statistics.median(steps), len(steps), samples=rates),
        Value("held_bytes_per_token", usage.held_bytes / usage.tokens, usage.tokens),
    ]


TASK = Speed()
