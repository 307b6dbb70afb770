"""The cache that one request asks for."""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.core.errors import IncompatiblePlan


@dataclass(frozen=True, slots=True)
class CacheParams:
    """A choice of cache, in the words of the command line.

    format: a KV format's name or k=NAME,v=NAME. policy: a policy with its budget and parameters, such as 'h2o:25%' or
    'window:1024,sinks=4'; 'full' keeps every token. residual_tokens: the newest tokens that a quantized format leaves
    in full precision. None: the engine's own. `kvarn.kv.choice` reads and writes them as one text. Raises
    IncompatiblePlan.
    """

    format: str | None = None
    policy: str | None = None
    residual_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.residual_tokens is not None and self.residual_tokens < 0:
            raise IncompatiblePlan(f"residual_tokens is {self.residual_tokens}; it must not be negative")

    @property
    def text(self) -> str:
        """As one writes it: 'full', 'int8', 'h2o:25%+int8', 'int4,residual=64'."""
        policy = "" if self.policy in (None, "full") else str(self.policy)
        kv = self.format or ""
        if kv and self.residual_tokens is not None:
            kv += f",residual={self.residual_tokens}"
        return "+".join(part for part in (policy, kv) if part) or "full"
