"""Whose turn it is: priority first, raised by the time for which it was passed over, then the tenant that was served
least, then arrival."""

from __future__ import annotations

from collections.abc import Iterable

from kvarn.engine.fairness import FairShare
from kvarn.engine.sequence import Sequence

CandidateKey = tuple[int, int, int, float, int]


class Turns:
    """aging_s: a priority that had no turn for so long counts as the next higher one (0: never)."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._fair = FairShare()
        self._passed_over_since_s: dict[int, float] = {}  # by priority

    def enter(self, seq: Sequence) -> None:
        self._fair.enter(seq.entry.tenant)

    def leave(self, seq: Sequence) -> None:
        self._fair.leave(seq.entry.tenant)

    def charge(self, seq: Sequence, to_tokens: int) -> None:
        """The sequence gets computed up to to_tokens; what a preemption repeats is charged once."""
        if to_tokens > seq.best_tokens:
            self._fair.charge(seq.entry.tenant, to_tokens - seq.best_tokens)
            seq.best_tokens = to_tokens

    def wanted(self, prompts: Iterable[Sequence], now_s: float) -> None:
        """Only priorities that want a turn can be passed over."""
        since_s = self._passed_over_since_s
        self._passed_over_since_s = {s.entry.priority: since_s.get(s.entry.priority, now_s) for s in prompts}

    def had(self, seq: Sequence, now_s: float) -> None:
        """Its priority had a turn."""
        self._passed_over_since_s[seq.entry.priority] = now_s

    def level(self, seq: Sequence, now_s: float) -> int:
        """Its priority, raised by the time for which that priority was passed over."""
        priority = seq.entry.priority
        if not self._aging_s:
            return priority
        return priority + int((now_s - self._passed_over_since_s.get(priority, now_s)) / self._aging_s)

    def key(self, seq: Sequence, now_s: float) -> CandidateKey:
        """Smaller goes first."""
        entry = seq.entry
        served = self._fair.served_tokens(entry.tenant)
        return (not seq.protected, -self.level(seq, now_s), served, entry.arrival_s, entry.seq_id)
