"""What `kvarn eval --caches` names: cache choices, and beside them a model whose layers share caches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvarn.core.cache_params import CacheParams
from kvarn.core.errors import IncompatiblePlan
from kvarn.core.options import EngineOptions
from kvarn.kv.choice import parse_choice

SHARE = "share="


@dataclass(frozen=True, slots=True)
class EvalChoice:
    """A cache choice, and how many neighbouring layers use one cache (1: each its own)."""

    params: CacheParams
    share_layers: int = 1

    @property
    def text(self) -> str:
        own = self.params.text
        if self.share_layers == 1:
            return own
        return f"{SHARE}{self.share_layers}" + (f"+{own}" if own != "full" else "")

    @property
    def is_full(self) -> bool:
        return self.text == "full"

    def options(self, base: EngineOptions) -> EngineOptions:
        """The engine that serves this choice."""
        return replace(base, kv=self.params.text, policy=None, share_layers=self.share_layers)


FULL = EvalChoice(CacheParams(policy="full"))


def parse_eval_choice(text: str) -> EvalChoice:
    """'share=2+int8' -> the choice. Raises UnknownName, IncompatiblePlan."""
    parts = [p.strip() for p in text.split("+")]
    shares = [p for p in parts if p.startswith(SHARE)]
    rest = "+".join(p for p in parts if p not in shares)
    if not shares:
        return EvalChoice(parse_choice(text))
    try:
        n = int(shares[0].removeprefix(SHARE))
    except ValueError:
        n = 0
    if n < 1 or len(shares) > 1:
        raise IncompatiblePlan(f"{text!r} shares no layers", fixes=("write, for example, share=2 or share=2+int8",))
    return EvalChoice(parse_choice(rest or "full"), n)


def parse_eval_choices(text: str) -> tuple[EvalChoice, ...]:
    """'full; int8; share=2'. The full cache, which the others are compared with, comes first, named or not. Raises
    UnknownName, IncompatiblePlan."""
    found = [parse_eval_choice(part) for part in text.split(";") if part.strip()]
    if not found:
        raise IncompatiblePlan(f"{text!r} names no cache", fixes=("write, for example, 'full; int8; h2o:25%'",))
    return tuple(dict.fromkeys((FULL, *found)))
