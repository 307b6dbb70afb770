"""Requests that begin alike and come at once: one computes the common beginning, the others wait and find it in the
cache. Pure: time is an argument."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from kvarn.engine.reasons import AwaitsPrefix
from kvarn.engine.sequence import Phase, Sequence


@dataclass(slots=True)
class Hold:
    """seq waits until `leader` has computed shared_tokens. seen: how far it was, when it last came on, at
    since_s."""

    seq: Sequence
    leader: Sequence
    shared_tokens: int
    seen: tuple[int, int]
    since_s: float

    def over(self, now_s: float, patience_s: float) -> bool:
        """The beginning is there, or the leader computes it no more, or did not come on for patience_s."""
        done = self.leader.computed_tokens
        if self.leader.phase is not Phase.RUNNING or done >= self.shared_tokens or done < self.seen[0]:
            return True
        if (progress := self.leader.progress) > self.seen:
            self.seen, self.since_s = progress, now_s
        return now_s - self.since_s > patience_s

    @property
    def why(self) -> AwaitsPrefix:
        return AwaitsPrefix(self.leader.seq_id, self.shared_tokens, self.leader.computed_tokens)


class Holding:
    """Waiting sequences that stand aside, so that those behind them are not held up. least_tokens: a wait must save at
    least so many (0: nobody is held back); patience_s: a leader that does not come on for so long is not waited for."""

    def __init__(self, least_tokens: int, patience_s: float) -> None:
        self._least_tokens, self._patience_s = least_tokens, patience_s
        self._holds: dict[int, Hold] = {}
        self._impatient: set[int] = set()

    def __len__(self) -> int:
        return len(self._holds)

    def find(self, seq: Sequence, leaders: Iterable[Sequence], now_s: float) -> Hold | None:
        """The wait that would save the sequence the most tokens; None where none saves enough. leaders: running
        sequences that it may wait for."""
        entry, best, saved = seq.entry, None, self._least_tokens
        if not self._least_tokens or not (entry.finds_prefix and entry.reuse_prompt) or seq.seq_id in self._impatient:
            return None
        for leader in leaders:
            ahead = leader.entry
            if not (ahead.leaves_prefix and ahead.reuse_prompt) or ahead.namespace != entry.namespace:
                continue
            shared = common_tokens(seq.tokens, leader.tokens, entry.block_tokens)
            if shared - leader.computed_tokens >= saved:
                saved = shared - leader.computed_tokens
                best = Hold(seq, leader, shared, leader.progress, now_s)
        return best

    def add(self, hold: Hold) -> None:
        self._holds[hold.seq.seq_id] = hold

    def remove(self, seq: Sequence) -> bool:
        """Forget a sequence; False where it was not held back."""
        self._impatient.discard(seq.seq_id)
        return self._holds.pop(seq.seq_id, None) is not None

    def released(self, now_s: float) -> list[Sequence]:
        """Those that wait no longer. Who waited for one that did not come on is not held back again."""
        over = [h for h in self._holds.values() if h.over(now_s, self._patience_s)]
        for hold in over:
            del self._holds[hold.seq.seq_id]
            if now_s - hold.since_s > self._patience_s:
                self._impatient.add(hold.seq.seq_id)
        return [h.seq for h in over]

    def why(self, seq: Sequence) -> AwaitsPrefix | None:
        hold = self._holds.get(seq.seq_id)
        return hold.why if hold is not None else None

    @property
    def any_why(self) -> AwaitsPrefix | None:
        """Why the first of them waits."""
        return next((h.why for h in self._holds.values()), None)


def common_tokens(tokens: list[int], others: list[int], block_tokens: int) -> int:
    """How many tokens the full blocks hold with which both begin; of `tokens` the last is always left to compute."""
    blocks = min(len(tokens) - 1, len(others)) // block_tokens
    if not blocks or tokens[:block_tokens] != others[:block_tokens]:
        return 0
    differs = range(1, blocks + 1)
    return block_tokens * bisect_left(
        differs, True, key=lambda n: tokens[: n * block_tokens] != others[: n * block_tokens]
    )
