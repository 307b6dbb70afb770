"""Few-shot sums: what retrieval alone does not show."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvarn.evals.tasks._questions import Question, answered, ask
from kvarn.evals.tasks.base import Bench, Settings, Task, Value
from kvarn.text import Tokenizer

SHOTS = 32


@dataclass(frozen=True)
class Arithmetic(Task):
    """Sums of two numbers of two digits after SHOTS solved ones. Every example teaches a little and none holds the
    answer, so damage shows here that a search for one fact hides."""

    shown: ClassVar[tuple[str, ...]] = ("seen_logprob", "seen_exact", "unseen_logprob")
    reads: ClassVar[tuple[str, ...]] = ("cases", "seed")
    version: ClassVar[int] = 2

    def context_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return 16 * (SHOTS + 1)  # a digit a token at most: '\n98 + 99 = 197' has 13

    def cost_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return 2 * settings.cases * 9 * SHOTS

    def run(self, bench: Bench, settings: Settings) -> Sequence[Value]:
        return ask(bench, questions(bench.tokenizer, settings))


def questions(tokenizer: Tokenizer, settings: Settings) -> Iterator[Question]:
    """No sum is asked that an example shows."""
    for case in range(settings.cases):
        rng = random.Random(f"{settings.seed} {case}")
        pairs = rng.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], SHOTS + 1)
        *shown, (a, b) = pairs
        shots = "".join(f"{x} + {y} = {x + y}\n" for x, y in shown)
        yield Question(tokenizer.encode(shots), *answered(tokenizer, f"{a} + {b} =", f" {a + b}"))


TASK = Arithmetic()
