"""Why a prefix lookup ends where it does. `at_tokens`: where in the text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvarn.kv.identity import Identity


@dataclass(frozen=True, slots=True)
class Complete:
    """All full blocks before the last token were found."""

    at_tokens: int

    def __str__(self) -> str:
        return "all full blocks were found" if self.at_tokens else "there is no full block before the last token"


@dataclass(frozen=True, slots=True)
class NeverSeen:
    """No block of this identity continues so, or it was evicted long ago."""

    at_tokens: int

    def __str__(self) -> str:
        return f"nothing cached continues like this from token {self.at_tokens}"


@dataclass(frozen=True, slots=True)
class Evicted:
    """The block was there and made room for others."""

    at_tokens: int

    def __str__(self) -> str:
        return f"the block from token {self.at_tokens} was evicted"


@dataclass(frozen=True, slots=True)
class WindowGone:
    """The text is known further, but a window group's last blocks before that point are gone."""

    at_tokens: int
    group: int

    def __str__(self) -> str:
        return f"beyond token {self.at_tokens} the window of group {self.group} is no longer complete"


@dataclass(frozen=True, slots=True)
class OtherIdentity:
    """The same tenant's text is cached further in another format, policy or adapter."""

    at_tokens: int
    cached_tokens: int
    identity: Identity

    def __str__(self) -> str:
        of = ", ".join(filter(None, (self.identity.kv_format, self.identity.policy, self.identity.adapter)))
        return f"from token {self.at_tokens} it is cached only as {of} ({self.cached_tokens} tokens)"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Another text has the same key: not used."""

    at_tokens: int

    def __str__(self) -> str:
        return f"another text has the key of the block from token {self.at_tokens}"


@dataclass(frozen=True, slots=True)
class Unused:
    """Nothing was looked for. reason: a sentence."""

    at_tokens: int
    reason: str

    def __str__(self) -> str:
        return self.reason


Why = Complete | NeverSeen | Evicted | WindowGone | OtherIdentity | Mismatch | Unused


@dataclass(slots=True)
class PrefixStats:
    """Counted apart from the index, by whoever uses what a lookup found: looking twice counts once."""

    lookups: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    evicted_blocks: int = 0

    def note(self, asked_tokens: int, hit_tokens: int, why: Why) -> None:
        self.lookups += 1
        self.asked_tokens += asked_tokens
        self.hit_tokens += hit_tokens
        self.endings[type(why).__name__] += 1
