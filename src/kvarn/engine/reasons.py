"""Why a request waits, was preempted, or was ended by the scheduler: small values for the response, metrics, events."""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.core.ledger import NoRoom


@dataclass(frozen=True, slots=True)
class NoSlot:
    """As many sequences run as may."""

    running: int
    max_seqs: int

    def __str__(self) -> str:
        return f"{self.running} of {self.max_seqs} sequences run"


@dataclass(frozen=True, slots=True)
class NoBlocks:
    """The blocks of its tokens are not free. headroom_tokens: what the running ones still have to take."""

    room: NoRoom
    tokens: int
    headroom_tokens: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens beside {self.headroom_tokens} of those running: {self.room}"


@dataclass(frozen=True, slots=True)
class NoBudget:
    """The step's tokens went to others."""

    step_tokens: int

    def __str__(self) -> str:
        return f"the step's {self.step_tokens} tokens went to others"


@dataclass(frozen=True, slots=True)
class Behind:
    """Others of its class (tenant and priority) stand before it."""

    ahead: int

    def __str__(self) -> str:
        return f"{self.ahead} stand before it in its class" if self.ahead else "it is the next of its class"


@dataclass(frozen=True, slots=True)
class RanOut:
    """The running ones used up the blocks in this step."""

    def __str__(self) -> str:
        return "the running sequences used up the blocks in this step"


@dataclass(frozen=True, slots=True)
class AwaitsParent:
    """A further completion (n > 1) starts when its prompt has been computed once."""

    parent_id: int

    def __str__(self) -> str:
        return f"its prompt is being computed by sequence {self.parent_id}"


@dataclass(frozen=True, slots=True)
class AwaitsProtected:
    """It was preempted as often as allowed; such sequences run one at a time, so that none can preempt another."""

    running_id: int

    def __str__(self) -> str:
        return f"preempted as often as allowed; sequence {self.running_id}, too, runs alone in that class"


@dataclass(frozen=True, slots=True)
class AwaitsPrefix:
    """A running sequence computes the beginning of its prompt just now."""

    leader_id: int
    shared_tokens: int
    computed_tokens: int

    def __str__(self) -> str:
        return (
            f"sequence {self.leader_id} computes the {self.shared_tokens} tokens with which both begin "
            f"({self.computed_tokens} so far)"
        )


@dataclass(frozen=True, slots=True)
class Repeats:
    """It shared a step with one that failed, and its policy counted what did not happen."""

    def __str__(self) -> str:
        return "it is computed again, because a step that it was in failed"


WaitReason = NoSlot | NoBlocks | NoBudget | RanOut | Behind | AwaitsParent | AwaitsProtected | AwaitsPrefix | Repeats


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Stands aside until its beginning is in the cache."""

    seq_id: int
    why: AwaitsPrefix

    def __str__(self) -> str:
        return f"sequence {self.seq_id} waits: {self.why}"


@dataclass(frozen=True, slots=True)
class Stalled:
    """Runs, but gets no row in this step: everyone it could preempt goes before it."""

    seq_id: int
    room: NoRoom

    def __str__(self) -> str:
        return f"sequence {self.seq_id} pauses: {self.room}"


@dataclass(frozen=True, slots=True)
class Preempted:
    """Lost its blocks to `for_seq`; lost_tokens are computed again. times counts this one, of `limit` allowed."""

    seq_id: int
    for_seq: int
    lost_tokens: int
    times: int
    limit: int
    at_s: float

    def __str__(self) -> str:
        return (
            f"sequence {self.seq_id} gave its blocks to sequence {self.for_seq}; {self.lost_tokens} tokens will be "
            f"computed again (preemption {self.times} of at most {self.limit})"
        )


@dataclass(frozen=True, slots=True)
class Expired:
    """Ended: its deadline passed."""

    seq_id: int
    deadline_s: float
    at_s: float

    def __str__(self) -> str:
        return f"sequence {self.seq_id} missed its deadline by {self.at_s - self.deadline_s:.3f} s"


@dataclass(frozen=True, slots=True)
class OutOfRoom:
    """Ended: it has the cache to itself and still finds no room, so waiting would not help."""

    seq_id: int
    tokens: int
    room: NoRoom

    def __str__(self) -> str:
        return f"sequence {self.seq_id} of {self.tokens} tokens does not fit although it runs alone: {self.room}"


Ended = Expired | OutOfRoom


@dataclass(frozen=True, slots=True)
class Admitted:
    """Joined the running ones; cached_tokens were found in the prefix index."""

    seq_id: int
    cached_tokens: int
