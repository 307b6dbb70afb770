"""How close a decode step comes to the machine's memory: bytes it must read over what the machine reads a second."""

from __future__ import annotations

from kvarn.engine.llm import LLM
from kvarn.engine.report import DecodeReads
from kvarn.kernels import backend_report


def roofline(llm: LLM, streams: int, context_tokens: int, step_s: float, threads: int) -> DecodeReads:
    """For `streams` sequences of context_tokens with a full cache, whose step took step_s."""
    cache = streams * context_tokens * llm.plan.bytes_per_token
    return DecodeReads(llm.model.step_weight_bytes, cache, step_s, _read_bytes_per_s(threads))


def _read_bytes_per_s(threads: int) -> float | None:
    """Measured now; None where the native kernels were not built."""
    if not any(r.name == "cpu" and r.available for r in backend_report()):
        return None
    from kvarn.kernels.cpu.probe import measure  # noqa: PLC0415  (needs the native backend)

    return measure(threads).read_bytes_per_s
