"""What is sent to a server: conversations, drawn once from a seed, so that every server gets the same load."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from kvarn.core.errors import InvalidRequest

# Common English words, one token each (with the space before) in most vocabularies; the report says how many tokens
# the server counted.
_COMMON = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part over new "
    "sound take only little work know place year live me back give most very after thing our just name good sentence "
    "man think say great where help through much before line right too mean old any same tell boy follow came want "
    "show also around form three small set put end does another well large must big even such because turn here why "
    "ask went men read need land different home us move try kind hand picture again change off play spell air away "
    "animal house point page "
)
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform whole numbers from low to high."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


def parse_lengths(text: str) -> Lengths:
    """'64' or '64:512'. Raises InvalidRequest."""
    low, _, high = text.partition(":")
    try:
        found = Lengths(int(low), int(high or low))
    except ValueError as error:
        raise InvalidRequest(f"{text!r} is no length", fixes=("write N or LOW:HIGH",)) from error
    if not 1 <= found.low <= found.high:
        raise InvalidRequest(f"lengths {text!r}", fixes=("use 1 <= LOW <= HIGH",))
    return found


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """conversations of `turns` user messages each. rate_per_s: arrivals of an open loop (Poisson); None: a closed loop
    of `users` who send their next request when the last is answered. system_tokens: shared by everybody; think_s: mean
    pause before a further turn. Lengths are in words."""

    conversations: int
    turns: int = 1
    users: int = 8
    rate_per_s: float | None = None
    system_tokens: int = 0
    prompt_tokens: Lengths = Lengths(64, 64)
    output_tokens: Lengths = Lengths(64, 64)
    think_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("conversations", "turns", "users"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}", fixes=("use 1 or more",))
        if self.rate_per_s is not None and not (self.rate_per_s > 0 and math.isfinite(self.rate_per_s)):
            raise InvalidRequest(f"rate is {self.rate_per_s}", fixes=("use more than 0 a second",))


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message, how long its answer shall be, and the pause before it is sent."""

    text: str
    output_tokens: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """arrival_s: from the start of the run; 0 in a closed loop."""

    number: int
    system: str | None
    turns: tuple[Turn, ...]
    arrival_s: float


def draw_load(spec: LoadSpec) -> tuple[Conversation, ...]:
    """The same conversations for the same spec."""
    source = random.Random(spec.seed)
    system = _text(source, spec.system_tokens) if spec.system_tokens else None
    found, at_s = [], 0.0
    for number in range(spec.conversations):
        if spec.rate_per_s is not None:
            at_s += source.expovariate(spec.rate_per_s)
        turns = tuple(_turn(source, spec, index) for index in range(spec.turns))
        found.append(Conversation(number, system, turns, at_s))
    return tuple(found)


def _turn(source: random.Random, spec: LoadSpec, index: int) -> Turn:
    text = _text(source, spec.prompt_tokens.draw(source))
    pause_s = source.expovariate(1 / spec.think_s) if index and spec.think_s else 0.0
    return Turn(text, spec.output_tokens.draw(source), pause_s)


def _text(source: random.Random, words: int) -> str:
    return " ".join(source.choices(WORDS, k=words))
