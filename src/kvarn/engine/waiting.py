"""The queue before the engine: first come, first served within a class (tenant, priority); the classes compete."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kvarn.engine.sequence import Sequence

ClassKey = tuple[bool, int, str]


def _order(seq: Sequence) -> tuple[float, int]:
    return (seq.entry.arrival_s, seq.entry.seq_id)


def class_of(seq: Sequence) -> ClassKey:
    """Those preempted as often as allowed are one class of their own."""
    return (True, 0, "") if seq.protected else (False, seq.entry.priority, seq.entry.tenant)


class WaitingQueue:
    """Only the classes' first sequences are ever looked at, so a step does not pay for the length of the queue."""

    def __init__(self) -> None:
        self._classes: dict[ClassKey, list[Sequence]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._classes.values():
            yield from queue

    def add(self, seq: Sequence) -> None:
        """By arrival, so that a preempted sequence stands before those that came after it."""
        insort(self._classes.setdefault(class_of(seq), []), seq, key=_order)
        self._size += 1

    def remove(self, seq: Sequence) -> None:
        key = class_of(seq)
        queue = self._classes[key]
        index = bisect_left(queue, _order(seq), key=_order)
        assert queue[index] is seq, f"sequence {seq.seq_id} does not stand in its class"
        del queue[index]
        self._size -= 1
        if not queue:
            del self._classes[key]

    def heads(self) -> list[Sequence]:
        """The first of each class."""
        return [queue[0] for queue in self._classes.values()]

    def head_of(self, key: ClassKey) -> Sequence | None:
        queue = self._classes.get(key)
        return queue[0] if queue else None

    def ahead_of(self, seq: Sequence) -> int:
        """How many stand before it in its class."""
        return bisect_left(self._classes[class_of(seq)], _order(seq), key=_order)
