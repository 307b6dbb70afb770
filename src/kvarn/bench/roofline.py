"""How close a decode step comes to the machine's memory: bytes it must read over what the machine reads a second."""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.engine.llm import LLM
from kvarn.kernels.cpu.probe import measure


@dataclass(frozen=True, slots=True)
class Roofline:
    """weight_bytes: read once a step however many streams. cache_bytes: of all streams at their depth."""

    weight_bytes: int
    cache_bytes: int
    read_bytes_per_s: float
    step_s: float

    @property
    def limit_s(self) -> float:
        """The least that a step can take."""
        return (self.weight_bytes + self.cache_bytes) / self.read_bytes_per_s

    @property
    def share(self) -> float:
        return self.limit_s / self.step_s

    def line(self) -> str:
        return (
            f"a decode step reads {(self.weight_bytes + self.cache_bytes) / 1e6:,.1f} MB "
            f"(weights {self.weight_bytes / 1e6:,.1f}, cache {self.cache_bytes / 1e6:,.1f}); at "
            f"{self.read_bytes_per_s / 1e9:.1f} GB/s that is {self.limit_s * 1e3:.2f} ms, it took "
            f"{self.step_s * 1e3:.2f} ms: {self.share:.0%} of the limit reached"
        )


def roofline(llm: LLM, streams: int, context_tokens: int, step_s: float, threads: int) -> Roofline:
    """For `streams` sequences of `context_tokens` whose step took step_s. An embedding that is not the output's matrix
    is counted too, though a step reads few of its rows."""
    cache = streams * context_tokens * llm.plan.bytes_per_token
    return Roofline(llm.model.weight_bytes, cache, measure(threads).read_bytes_per_s, step_s)
