"""Generated facts to look up: one of many key-value pairs, and a variable through a chain of assignments."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvarn.evals.tasks._questions import Question, answered, ask, haystack, plain
from kvarn.evals.tasks.base import Bench, Settings, Task, Value
from kvarn.text import Tokenizer

ADJECTIVES = ("amber", "bold", "calm", "dusty", "eager", "frozen", "gentle", "hollow", "ivory", "jolly")
NOUNS = ("anchor", "barrel", "candle", "dagger", "engine", "feather", "garden", "hammer", "island", "jacket")
HOPS = 2
DEPTHS = 8
ASKED = "\nQuestion: What is the number of the {key}?\nAnswer: The number of the {key} is"


@dataclass(frozen=True)
class Recall(Task):
    """Key-value retrieval and variable tracking as in RULER (Hsieh et al. 2024, arXiv 2404.06654, section 3): `kv_`
    asks the number of one of many words, `vt_` the value of a variable that was assigned HOPS times onwards, with the
    chain spread over prose. RULER asks for all variables of a value; one is asked here, so that a small model can.

    RULER draws the places; here the line that holds the answer goes through DEPTHS evenly spaced ones, case by case, so
    that a few cases do not hang on where chance put them."""

    shown: ClassVar[tuple[str, ...]] = ("kv_seen_logprob", "kv_unseen_logprob", "vt_seen_logprob", "vt_unseen_logprob")
    reads: ClassVar[tuple[str, ...]] = ("text", "lengths", "cases", "seed")
    version: ClassVar[int] = 3

    def context_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return max(settings.lengths) + 1

    def cost_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return 2 * 2 * sum(settings.lengths) * _cases(settings)

    def run(self, bench: Bench, settings: Settings) -> Sequence[Value]:
        pairs = ask(bench, _each(bench.tokenizer, settings, key_value), "kv_")
        return [*pairs, *ask(bench, _each(bench.tokenizer, settings, tracking), "vt_")]


def _cases(settings: Settings) -> int:
    """For each length."""
    return max(1, settings.cases // len(settings.lengths))


def _each(
    tokenizer: Tokenizer, settings: Settings, make: Callable[[Tokenizer, Settings, int, float, random.Random], Question]
) -> Iterator[Question]:
    for length in settings.lengths:
        for case, depth in enumerate(depths(_cases(settings))):
            yield make(tokenizer, settings, length, depth, random.Random(f"{settings.seed} {length} {case}"))


def depths(cases: int) -> list[float]:
    """Where the answer stands in each case, 0 to 1: the middles of equal parts of the text, over and over."""
    parts = min(cases, DEPTHS)
    return [(case % parts + 0.5) / parts for case in range(cases)]


def key_value(tokenizer: Tokenizer, settings: Settings, length: int, depth: float, rng: random.Random) -> Question:
    """Pairs take half of the text, or all pairs that there are, and prose the rest; the pair at `depth` is asked."""
    keys = [f"{a} {n}" for a in ADJECTIVES for n in NOUNS]
    rng.shuffle(keys)
    numbers = {key: rng.randrange(10_000, 100_000) for key in keys}
    lines = [f"\nThe number of the {key} is {numbers[key]}.\n" for key in keys]
    fit = length // (2 * max(len(plain(tokenizer, line)) for line in lines))
    lines = lines[: max(1, fit)]
    asked = keys[int(depth * len(lines))]
    question, answer = answered(tokenizer, ASKED.format(key=asked), f" {numbers[asked]}")
    needles = [((i + 0.5) / len(lines), line) for i, line in enumerate(lines)]
    size = length - len(question) - len(answer)
    return Question(haystack(tokenizer, settings.text, needles, size, rng), question, answer, {"depth": depth})


def tracking(tokenizer: Tokenizer, settings: Settings, length: int, depth: float, rng: random.Random) -> Question:
    """VAR A = 12345 at `depth`, VAR B = VAR A, ... spread over the prose behind it; the last one's value is asked."""
    names = ["".join(rng.sample(string.ascii_uppercase, 3)) for _ in range(HOPS + 1)]
    value = rng.randrange(10_000, 100_000)
    lines = [f"\nVAR {names[0]} = {value}.\n"]
    lines += [f"\nVAR {b} = VAR {a}.\n" for a, b in itertools.pairwise(names)]
    places = [depth, *sorted(rng.uniform(depth, 1.0) for _ in lines[1:])]
    asked = f"\nQuestion: What is the value of VAR {names[-1]}?\nAnswer: VAR {names[-1]} ="
    question, answer = answered(tokenizer, asked, f" {value}")
    size = length - len(question) - len(answer)
    context = haystack(tokenizer, settings.text, list(zip(places, lines, strict=True)), size, rng)
    return Question(context, question, answer, {"depth": depth})


TASK = Recall()
