"""The running sequences in their fixed order: who keeps its blocks when there are too few."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kvarn.engine.sequence import Rank, Sequence


def _rank(seq: Sequence) -> Rank:
    return seq.rank


class RunningList:
    """By `Sequence.rank`, which does not change while a sequence runs."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def copy(self) -> list[Sequence]:
        return self._sequences.copy()

    @property
    def first(self) -> Sequence:
        return self._sequences[0]

    @property
    def last(self) -> Sequence:
        """The first to give its blocks."""
        return self._sequences[-1]

    def add(self, seq: Sequence) -> None:
        insort(self._sequences, seq, key=_rank)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._sequences, seq.rank, key=_rank)
        assert self._sequences[index] is seq, f"sequence {seq.seq_id} does not stand where its rank says"
        del self._sequences[index]

    @property
    def places(self) -> int:
        """Sequences, and further completions that will start from them."""
        return len(self._sequences) + sum(len(s.children) for s in self._sequences)

    def headroom_tokens(self, growth_tokens: int) -> int:
        """What they still have to take: their prompts' remaining slots, and growth_tokens each."""
        promised = sum(len(s.tokens) - s.slots_tokens for s in self._sequences)
        return promised + growth_tokens * len(self._sequences)
