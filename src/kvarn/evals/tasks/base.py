"""What an evaluation task is: a frozen dataclass that says what it needs and returns measured values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvarn.core.registry import load, names_in
from kvarn.evals.scoring import Scorer
from kvarn.text import Tokenizer

PACKAGE = "kvarn.evals.tasks"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user sets for all tasks.

    text: the prose that `ppl`, `kl` and `stream` read and that haystacks are made of. lengths: prompt lengths of
    `needle` and `recall`. context_tokens: those of a window of `ppl` and `kl`, of which the last stride_tokens are
    scored; windows: how many of them. cases: generated questions of a kind. stream_tokens: how far `stream` goes, None
    for four times the trained context.
    """

    text: str = field(repr=False)
    lengths: tuple[int, ...] = (512, 1024)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    context_tokens: int = 1024
    stride_tokens: int = 256
    windows: int = 4
    cases: int = 8
    stream_tokens: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Value:
    """One measured number. n: over how many tokens or cases. detail: where it belongs (length, depth), if anywhere.
    samples: what each window, case or turn gave, from which its error comes; none where there is nothing to compare.
    slope: by how much the value moves where the mean of the samples moves by 1."""

    metric: str
    value: float
    n: int
    detail: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[float] = ()
    slope: float = 1.0


@dataclass(frozen=True)
class Bench:
    """What a task is handed: the cache choice under test, the full cache to compare with, the tokenizer. drops: the
    choice drops tokens, so what it had seen when it did matters."""

    scorer: Scorer
    full: Scorer
    tokenizer: Tokenizer
    trained_tokens: int
    drops: bool


@dataclass(frozen=True)
class Task:
    """Base of all tasks. shown: the metrics that a table shows, the most telling one first. reads: the settings that
    change what it measures (they are part of a result's fingerprint). paired: an error is that of the difference to
    the full cache on the same samples (False: of the value itself). version: raised when it measures something else,
    so that older results of it alone are not kept."""

    shown: ClassVar[tuple[str, ...]]
    reads: ClassVar[tuple[str, ...]] = ("text", "seed")
    paired: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def context_tokens(self, settings: Settings, trained_tokens: int) -> int:
        """The longest sequence that it feeds, its generated token included."""
        raise NotImplementedError

    def cost_tokens(self, settings: Settings, trained_tokens: int) -> int:
        """Tokens that it computes, about: for the progress bar."""
        raise NotImplementedError

    def run(self, bench: Bench, settings: Settings) -> Sequence[Value]:
        raise NotImplementedError


def task_names() -> tuple[str, ...]:
    return names_in(PACKAGE)


def load_task(name: str) -> Task:
    """The task in the file `name`.py. Raises UnknownName with the known ones."""
    return load(PACKAGE, name, "TASK", "evaluation task")


def error_of(value: Value, beside: Sequence[float] | None = None) -> float | None:
    """Standard error of a value by its samples; beside: of its difference to what gave these on the same windows or
    cases. None where fewer than two samples tell, or they are not the same ones."""
    samples = list(value.samples)
    if beside is not None:
        if len(beside) != len(samples):
            return None
        samples = [mine - theirs for mine, theirs in zip(samples, beside, strict=True)]
    if len(samples) < 2:
        return None
    return abs(value.slope) * statistics.stdev(samples) / math.sqrt(len(samples))


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))
