"""What chunks of prompts cost a step, and how much of that long prompts may spend in one.

A chunk of n tokens behind `start` others costs about f + c n + h start + g n start: something for being there at all,
its products, reading the keys and values before it, attending over them. Where a step takes it through a share of the
layers only, all but f is that share of it. The four prices are learned by normalised
least mean squares (Haykin, Adaptive Filter Theory, chapter 6): an error moves them only along the chunk that showed it,
so that what short beginnings taught outlasts the end of a long prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

LEAST_TOKENS = 2  # of one long prompt a step, whatever they cost: it always comes on
DEARER, CHEAPER = 0.4, 0.2  # of an error, how much is believed at once; rather too dear than too cheap
MOST_JUMP = 2.0  # more than so many times what was expected is somebody else's work on the machine
WHOLE_TOKENS = 48  # fewer than so many at once read weights and keys too often: better more, some layers at a time
LAYERED_TOKENS = 64  # of a chunk that goes through the layers in several steps, at most
MEANT_LAYERS = 2.2  # of such a chunk in a step: few, so that it has many tokens; two, while prices vary by a quarter
UNIT_TOKENS, UNIT_START = 8.0, 1024.0  # in which a chunk's terms are of one size
LEAST_PRICE_S = 1e-9

Terms = tuple[float, float, float, float]


class Chunk(NamedTuple):
    """share: of the layers."""

    n_tokens: int
    start: int
    share: float = 1.0


def _terms(n_tokens: int, start: int, share: float = 1.0) -> Terms:
    n, behind = n_tokens / UNIT_TOKENS, start / UNIT_START
    return (1.0, share * n, share * behind, share * n * behind)


class ChunkPrices:
    """The four prices, in seconds for a unit of each term; all 0 until the first chunk was paid for."""

    def __init__(self) -> None:
        self._prices: Terms = (0.0, 0.0, 0.0, 0.0)

    @property
    def known(self) -> bool:
        return any(self._prices)

    def cost_s(self, n_tokens: int, start: int, share: float = 1.0) -> float:
        return sum(p * t for p, t in zip(self._prices, _terms(n_tokens, start, share), strict=True))

    def layered_tokens(self, start: int, seconds: float, layers: int) -> int:
        """How many tokens behind `start` others can go through MEANT_LAYERS of so many layers for so much."""
        fixed = self._prices[0]
        return self.fitting_tokens(start, fixed + max(0.0, seconds - fixed) * layers / MEANT_LAYERS)

    def fitting_layers(self, n_tokens: int, start: int, seconds: float, layers: int) -> int:
        """How many of so many layers such a chunk can go through for about so much."""
        fixed = self._prices[0]
        all_s = self.cost_s(n_tokens, start) - fixed
        return round(layers * max(0.0, seconds - fixed) / all_s) if all_s > 0 else 0

    def fitting_tokens(self, start: int, seconds: float) -> int:
        """How many tokens behind `start` others can be had for so much; 0 for none."""
        fixed, token, behind, both = self._prices
        per_token = (token + both * start / UNIT_START) / UNIT_TOKENS
        left = seconds - fixed - behind * start / UNIT_START
        return int(left / per_token) if per_token > 0 and left > 0 else 0

    def learn(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """These chunks of one step cost so much together."""
        f, c, h, g = (sum(each) for each in zip(*(_terms(*chunk) for chunk in chunks), strict=True))
        terms = (f, c, h, g)
        expected = sum(p * t for p, t in zip(self._prices, terms, strict=True))
        rate = 1.0
        if self.known:
            seconds = min(seconds, MOST_JUMP * expected)
            rate = DEARER if seconds > expected else CHEAPER
        move = rate * (seconds - expected) / sum(t * t for t in terms)
        f, c, h, g = (max(LEAST_PRICE_S, p + move * t) for p, t in zip(self._prices, terms, strict=True))
        self._prices = (f, c, h, g)


class Allowance(Protocol):
    """What long prompts may have of one step."""

    def tokens(self, start: int) -> int:
        """Tokens of a prompt whose next one stands at `start`."""
        ...

    def layered_tokens(self, start: int, layers: int) -> int:
        """Tokens of a chunk that goes through so many layers in several steps; 0 where one better goes whole."""
        ...

    def layers(self, start: int, n_tokens: int, layers: int) -> int:
        """How many of so many layers such a chunk may go through in this step."""
        ...

    def spend(self, start: int, n_tokens: int, share: float = 1.0) -> None: ...


class TokenAllowance:
    """So many tokens, whatever they cost."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def tokens(self, start: int) -> int:
        return self._left

    def layered_tokens(self, start: int, layers: int) -> int:
        return 0

    def layers(self, start: int, n_tokens: int, layers: int) -> int:
        return layers if self._left > 0 else 0

    def spend(self, start: int, n_tokens: int, share: float = 1.0) -> None:
        self._left -= n_tokens


class TimeAllowance:
    """Tokens for so many seconds; the first prompt of a step gets some in any case."""

    def __init__(self, prices: ChunkPrices, seconds: float) -> None:
        self._prices, self._left_s, self._untouched = prices, seconds, True

    def tokens(self, start: int) -> int:
        return max(self._prices.fitting_tokens(start, self._left_s), LEAST_TOKENS if self._untouched else 0)

    def layered_tokens(self, start: int, layers: int) -> int:
        whole = self.tokens(start)
        if not self._untouched or not self._prices.known or whole >= WHOLE_TOKENS:
            return 0
        least = LEAST_TOKENS * layers // 2  # a layer of so many costs about what a token costs
        layered = min(LAYERED_TOKENS, max(least, self._prices.layered_tokens(start, self._left_s, layers)))
        return layered if layered > whole else 0

    def layers(self, start: int, n_tokens: int, layers: int) -> int:
        least = -(-LEAST_TOKENS * layers // n_tokens) if self._untouched else 0
        return min(layers, max(least, self._prices.fitting_layers(n_tokens, start, self._left_s, layers)))

    def spend(self, start: int, n_tokens: int, share: float = 1.0) -> None:
        self._left_s -= self._prices.cost_s(n_tokens, start, share)
        self._untouched = False
