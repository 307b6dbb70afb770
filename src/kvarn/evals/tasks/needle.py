"""A pass key hidden in prose, by depth and length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvarn.evals.tasks._questions import Question, answered, ask, haystack
from kvarn.evals.tasks.base import Bench, Settings, Task, Value
from kvarn.text import Tokenizer

QUESTION = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class Needle(Task):
    """Passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300), one key for each length and depth. Depth 0 is
    the beginning of the text."""

    shown: ClassVar[tuple[str, ...]] = ("seen_logprob", "seen_exact", "unseen_logprob", "unseen_exact")
    reads: ClassVar[tuple[str, ...]] = ("text", "lengths", "depths", "seed")
    version: ClassVar[int] = 2

    def context_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return max(settings.lengths) + 1

    def cost_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return 2 * sum(settings.lengths) * len(settings.depths)

    def run(self, bench: Bench, settings: Settings) -> Sequence[Value]:
        return ask(bench, questions(bench.tokenizer, settings), cells=True)


def questions(tokenizer: Tokenizer, settings: Settings) -> Iterator[Question]:
    """One a length and depth; context, question and answer together are `length` tokens."""
    for length in settings.lengths:
        for depth in settings.depths:
            rng = random.Random(f"{settings.seed} {length} {depth}")
            key = rng.randrange(10_000, 100_000)
            needle = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
            question, answer = answered(tokenizer, QUESTION, f" {key}")
            size = length - len(question) - len(answer)
            context = haystack(tokenizer, settings.text, [(depth, needle)], size, rng)
            yield Question(context, question, answer, {"length": length, "depth": depth})


TASK = Needle()
