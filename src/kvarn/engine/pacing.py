"""How many prompt tokens a step may carry beside rows that decode, so that the others' next tokens come at most so many
times as late as without them. Learned from the durations of the steps; no clock here, so tests drive it by numbers."""

from __future__ import annotations

from collections.abc import Sequence

from kvarn.engine.step_plan import Row

LEAST_TOKENS = 4  # a prompt always comes on
FASTER, SLOWER = 0.3, 0.05  # weight of a new duration of decoding; it is easily too long, hardly ever too short
MOST_JUMP = 2.0  # more than so many times what was known is somebody else's work on the machine
DEARER, CHEAPER = 0.5, 0.2  # of a new cost of a prompt token, which grows with the text before it


class Pace:
    """most_slowdown: a step with prompt tokens takes at most so many times what its decoding rows take alone."""

    def __init__(self, most_slowdown: float) -> None:
        self._most_slowdown = most_slowdown
        self._decode_s: dict[int, float] = {}  # by bit length of the number of rows
        self._token_s: float | None = None

    def tokens(self, decodes: int) -> int | None:
        """Prompt tokens beside so many decoding rows; None where nothing is known yet."""
        alone_s = self._alone_s(decodes)
        if alone_s is None or self._token_s is None:
            return None
        return max(LEAST_TOKENS, int((self._most_slowdown - 1.0) * alone_s / self._token_s))

    def note(self, rows: Sequence[Row], duration_s: float) -> None:
        """A step with these rows took so long."""
        decodes = sum(r.n_tokens == 1 for r in rows)
        prompt_tokens = sum(r.n_tokens for r in rows) - decodes
        if not decodes:
            return
        if not prompt_tokens:
            bucket = decodes.bit_length()
            old_s = self._decode_s.get(bucket, duration_s)
            new_s = min(duration_s, MOST_JUMP * old_s)
            self._decode_s[bucket] = old_s + (FASTER if new_s < old_s else SLOWER) * (new_s - old_s)
        elif (alone_s := self._alone_s(decodes)) is not None:
            token_s = max(0.0, duration_s - alone_s) / prompt_tokens
            old_s = token_s if self._token_s is None else self._token_s
            new_s = min(token_s, MOST_JUMP * old_s)
            self._token_s = max(1e-9, old_s + (DEARER if new_s > old_s else CHEAPER) * (new_s - old_s))

    def _alone_s(self, decodes: int) -> float | None:
        """What so many rows take alone. Of a number that was never seen, the nearest one's time: never more than that
        for more rows, and in proportion for fewer, so that it is rather too short."""
        if not self._decode_s:
            return None
        bucket = decodes.bit_length()
        nearest = min(self._decode_s, key=lambda b: abs(b - bucket))
        return self._decode_s[nearest] * min(1.0, 2.0 ** (bucket - nearest))
