"""How much of long prompts a step may compute beside rows that decode, so that the others' next tokens come at most so
many times as late as without them. Learned from how long steps took; no clock here, so tests drive it by numbers.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from kvarn.engine.prices import Allowance, Chunk, ChunkPrices, TimeAllowance, TokenAllowance
from kvarn.engine.step_plan import Row

KEPT_STEPS = 9  # steps without prompts, whose median is what decoding takes
LOOK_EVERY_STEPS = 64  # steps with prompts until one without shows again what decoding takes


class Pace:
    """most_slowdown: a step with chunks of long prompts takes about so many times what its decoding rows take alone."""

    def __init__(self, most_slowdown: float) -> None:
        self._most_slowdown = most_slowdown
        self._alone: dict[int, deque[float]] = {}  # seconds of steps, by bit length of the number of rows
        self._prices = ChunkPrices()
        self._mixed = False
        self._until_look_steps = 0

    def allowance(self, decodes: int) -> Allowance:
        """For long prompts beside so many decoding rows. None at all now and then: the step shows what those take."""
        if self._until_look_steps <= 0:
            self._until_look_steps = LOOK_EVERY_STEPS
            return TokenAllowance(0)
        return TimeAllowance(self._prices, (self._most_slowdown - 1.0) * (self._alone_s(decodes) or 0.0))

    def note(self, rows: Sequence[Row], duration_s: float) -> None:
        """A step with these rows took so long."""
        chunks = [Chunk(r.n_tokens, r.start, r.share) for r in rows if r.n_tokens > 1]
        decodes = len(rows) - len(chunks)
        if not chunks:
            self._until_look_steps = LOOK_EVERY_STEPS
            self._alone.setdefault(decodes.bit_length(), deque(maxlen=KEPT_STEPS)).append(duration_s)
            return
        self._until_look_steps -= decodes > 0
        self._learn(chunks, decodes, duration_s)

    def _learn(self, chunks: Sequence[Chunk], decodes: int, duration_s: float) -> None:
        """Steps of prompts alone teach until there is a better one: too dear, since few tokens read all weights."""
        alone_s = self._alone_s(decodes) if decodes else None
        if alone_s is not None:
            self._mixed = True
            self._prices.learn(chunks, max(0.0, duration_s - alone_s))
        elif not decodes and not self._mixed:
            self._prices.learn(chunks, duration_s)

    def _alone_s(self, decodes: int) -> float | None:
        """What so many rows take alone. Of a number that was never seen, the nearest one's time: never more than that
        for more rows, and in proportion for fewer, so that it is rather too short."""
        if not self._alone:
            return None
        bucket = decodes.bit_length()
        nearest = min(self._alone, key=lambda b: abs(b - bucket))
        return statistics.median(self._alone[nearest]) * min(1.0, 2.0 ** (bucket - nearest))
