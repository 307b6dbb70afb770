"""What the scheduler is told once (`SchedulerConfig`) and what it decides for one step (`StepPlan`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvarn.core.errors import IncompatiblePlan
from kvarn.engine.prices import Allowance
from kvarn.engine.reasons import Admitted, Ended, HeldBack, Preempted, Stalled, WaitReason


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """step_tokens: token rows of one step at most. beside_decodes_tokens: prefill rows at most in a step that also
    decodes (None: what step_tokens leaves), and prefill_per_decode more for each row that decodes, so that a long
    prompt slows the others' next token by a bounded factor.
    short_tokens: a prompt of which no more was left to compute when it was admitted is not held to the pace, which
    spreads long ones over steps.
    chunk_tokens: rows of one sequence a step at most. model_layers: chunks of long prompts may go through so many in
    several steps (0: never). growth_tokens: what admission leaves free for each running
    sequence to grow. aging_s: a priority that had no turn for so long counts as the next higher one (0: never).
    hold_tokens: a request waits for one that computes the beginning of its prompt where that saves it at least so many
    tokens (0: never), but not for one that did not come on for hold_s.
    recompute_all: nothing is cached (`--cache none`): each row starts at token 0 and is never cut, so a step holds at
    least one whole sequence even where that is more than step_tokens. Raises IncompatiblePlan."""

    max_seqs: int = 64
    step_tokens: int = 512
    context_tokens: int = 1 << 62
    beside_decodes_tokens: int | None = None
    prefill_per_decode: int = 0
    short_tokens: int = 64
    chunk_tokens: int | None = None
    model_layers: int = 0
    max_preemptions: int = 4
    growth_tokens: int = 32
    aging_s: float = 30.0
    hold_tokens: int = 64
    hold_s: float = 1.0
    recompute_all: bool = False

    def __post_init__(self) -> None:
        for name in ("max_seqs", "step_tokens", "context_tokens", "beside_decodes_tokens", "chunk_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise IncompatiblePlan(f"{name} is {value}; it must be at least 1")
        names = ("max_preemptions", "growth_tokens", "aging_s", "prefill_per_decode", "hold_tokens", "hold_s")
        for name in (*names, "model_layers"):
            if (value := getattr(self, name)) < 0:
                raise IncompatiblePlan(f"{name} is {value}; it must not be negative")


class Layers(NamedTuple):
    """The layers [begin, end) of `of` that a step takes a row through."""

    begin: int
    end: int
    of: int


class Row(NamedTuple):
    """Compute tokens [start, start + n_tokens) of a sequence. samples: its last row gives the next token; for n > 1 a
    first token is drawn from it for each of `children` too (hand them to `Scheduler.fork`). layers: only these, which
    go on where the step before ended; the tokens are in the cache after the last."""

    seq_id: int
    start: int
    n_tokens: int
    samples: bool
    children: tuple[int, ...] = ()
    layers: Layers | None = None

    @property
    def complete(self) -> bool:
        """Whether its tokens are in the cache after this step."""
        return self.layers is None or self.layers.end == self.layers.of

    @property
    def new_tokens(self) -> int:
        """How many are in the cache that were not."""
        return self.n_tokens if self.complete else 0

    @property
    def share(self) -> float:
        """Of the layers."""
        return 1.0 if self.layers is None else (self.layers.end - self.layers.begin) / self.layers.of


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: rows, decodes first. again: rows in which the model reads a text again, behind it, storing nothing.
    Those in `ended` are gone; tell whoever asked. held: those that stand aside from now on. head_wait: what holds up
    the first of the n_waiting."""

    rows: tuple[Row, ...]
    again: tuple[Row, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    stalled: tuple[Stalled, ...] = ()
    held: tuple[HeldBack, ...] = ()
    ended: tuple[Ended, ...] = ()
    head_wait: WaitReason | None = None
    n_waiting: int = 0


@dataclass(slots=True)
class StepDraft:
    """A plan while it is made. left_tokens: rows that it may still take. Beside rows that decode, short prompts may
    have short_tokens of them, and long ones what the allowance gives (None: nobody decodes). passed_over: priorities
    of prompts whose turn it was and for which nothing was left."""

    now_s: float
    left_tokens: int
    short_tokens: int = 0
    allowance: Allowance | None = None
    rows: dict[int, Row] = field(default_factory=dict)
    again: dict[int, Row] = field(default_factory=dict)
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    stalled: list[Stalled] = field(default_factory=list)
    held: list[HeldBack] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    head_wait: WaitReason | None = None
    passed_over: set[int] = field(default_factory=set)

    @property
    def ran_out(self) -> bool:
        """Some running sequence found no room: nobody is admitted in this step."""
        return bool(self.preempted or self.stalled)

    def done(self, n_waiting: int) -> StepPlan:
        return StepPlan(
            rows=tuple(self.rows.values()),
            again=tuple(self.again.values()),
            admitted=tuple(self.admitted),
            preempted=tuple(self.preempted),
            stalled=tuple(self.stalled),
            held=tuple(self.held),
            ended=tuple(self.ended),
            head_wait=self.head_wait,
            n_waiting=n_waiting,
        )
