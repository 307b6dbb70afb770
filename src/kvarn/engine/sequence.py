"""A sequence as the scheduler sees it: what was asked (`Entry`) and how far it is (`Sequence`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvarn.core.errors import InvalidRequest
from kvarn.engine.reasons import Preempted, WaitReason

Rank = tuple[int, int, float, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One request's way into the queue.

    seq_id: unique, its first completion's. child_ids: ids of the further completions (n > 1), one each. arrival_s,
    deadline_s: on the clock that `schedule` is given. priority: larger goes first. tenant: who shares the engine
    fairly. namespace: whose prefix blocks may be found (see kvarn.kv.prefix). reuse_prompt: False where every prompt
    token must be computed (prompt logprobs). finds_prefix, leaves_prefix: whether the cache looks its prompt up, and
    whether others find its full blocks while it is computed. replayed_tokens: the last of the prompt that are
    computed as if they had been generated: block by block of block_tokens, so that the cache decides and seals
    between them as it does while decoding. stepwise: the same for what was generated and has to be computed again
    after a preemption; where the cache decides between blocks, it then decides the same. patient: nobody waits for
    its next token, only for its last: prompts beside it need not be held short. by_layers: chunks may go through the
    layers in several steps. token_by_token: what is replayed or was generated comes back so, since rows that grow
    unevenly seal blocks within what is one block of the text. Raises InvalidRequest.
    """

    seq_id: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float
    child_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    namespace: bytes = b""
    deadline_s: float | None = None
    reuse_prompt: bool = True
    finds_prefix: bool = False
    leaves_prefix: bool = False
    replayed_tokens: int = 0
    stepwise: bool = False
    block_tokens: int = 1
    by_layers: bool = False
    token_by_token: bool = False
    patient: bool = False

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise InvalidRequest("the prompt is empty", fixes=("send at least one token",))
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {self.max_tokens}", fixes=("use 1 or more",))
        if not 0 <= self.replayed_tokens < len(self.prompt_ids):
            raise InvalidRequest(
                f"{self.replayed_tokens} replayed tokens of a prompt of {len(self.prompt_ids)}",
                fixes=("replay fewer tokens than the prompt has",),
            )

    def chunk_end(self, start: int) -> int | None:
        """Where a chunk that begins at `start` must end because of what is replayed; None: nowhere."""
        if not (self.replayed_tokens or self.stepwise):
            return None
        begin = len(self.prompt_ids) - self.replayed_tokens
        if self.token_by_token and start >= begin:
            return start + 1
        return begin if start < begin else start - start % self.block_tokens + self.block_tokens

    @property
    def slots_tokens(self) -> int:
        """Tokens that need a slot at most: the last one generated is never fed back."""
        return len(self.prompt_ids) + self.max_tokens - 1


class Phase(StrEnum):
    WAITING = "waiting"  # holds nothing
    RUNNING = "running"  # registered with the cache
    UNBORN = "unborn"  # a further completion whose prompt is not computed yet
    GONE = "gone"  # ended, and unknown to the scheduler


@dataclass(eq=False, slots=True)
class Sequence:
    """Mutable, the scheduler's own.

    tokens: prompt and generated. computed_tokens of them stand in the cache; slots_tokens have slots.
    cached_tokens: found in the prefix index when first admitted. best_tokens: most ever computed (charged once).
    uncached_tokens: had to be computed when it was last admitted. chunk_tokens of what follows went through
    chunk_layers of the layers so far (0 and 0: none). again_tokens: of the parts in which the model has still to read
    its text again before it goes on, the first of which went through again_layers of the layers.
    level: its priority when it was admitted, with what waiting added. protected: it may not be preempted again.
    """

    entry: Entry
    tokens: list[int]
    phase: Phase = Phase.WAITING
    computed_tokens: int = 0
    slots_tokens: int = 0
    cached_tokens: int | None = None
    best_tokens: int = 0
    uncached_tokens: int = 0
    chunk_tokens: int = 0
    chunk_layers: int = 0
    again_tokens: list[int] = field(default_factory=list)
    again_layers: int = 0
    protected: bool = False
    level: int = 0
    parent_id: int | None = None
    children: list[int] = field(default_factory=list)
    preemptions: list[Preempted] = field(default_factory=list)
    waits: list[WaitReason] = field(default_factory=list)

    @property
    def seq_id(self) -> int:
        return self.entry.seq_id

    @property
    def pending_tokens(self) -> int:
        """Tokens that are not in the cache yet: 1 while decoding."""
        return len(self.tokens) - self.computed_tokens

    def is_long(self, short_tokens: int) -> bool:
        """Whether more than short_tokens are to be computed before it decodes, or were when it was admitted."""
        pending = self.pending_tokens
        return pending > short_tokens or (pending > 1 and self.uncached_tokens > short_tokens)

    @property
    def progress(self) -> tuple[int, int]:
        """How far it is: only grows while it runs."""
        return (self.computed_tokens, self.chunk_layers)

    def stand_at(self, computed_tokens: int) -> None:
        """So many tokens stand in the cache, and nothing of more."""
        self.computed_tokens, self.chunk_tokens, self.chunk_layers = computed_tokens, 0, 0

    @property
    def rank(self) -> Rank:
        """Who keeps its blocks: smaller goes first. Fixed while it runs, so there is always one who goes first."""
        return (not self.protected, -self.level, self.entry.arrival_s, self.entry.seq_id)

    def note_wait(self, reason: WaitReason) -> None:
        """Keep a reason, the last one of a kind."""
        if self.waits and type(self.waits[-1]) is type(reason):
            self.waits[-1] = reason
        else:
            self.waits.append(reason)
