"""Kvarn: an LLM inference engine and planner whose KV cache is the programmable part.

`import kvarn` is light: what needs torch is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarn.core.errors import KvarnError
    from kvarn.core.options import EngineOptions
    from kvarn.core.requests import Completion, Delta, RequestOutput, SamplingParams
    from kvarn.engine.llm import LLM
    from kvarn.evals.compress import Compressed, compress
    from kvarn.planner.api import plan
    from kvarn.planner.result import Plan

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Compressed",
    "Delta",
    "EngineOptions",
    "KvarnError",
    "LLM",
    "Plan",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "compress",
    "plan",
]

_HOMES = {
    "Completion": "kvarn.core.requests",
    "Compressed": "kvarn.evals.compress",
    "compress": "kvarn.evals.compress",
    "Delta": "kvarn.core.requests",
    "EngineOptions": "kvarn.core.options",
    "KvarnError": "kvarn.core.errors",
    "LLM": "kvarn.engine.llm",
    "Plan": "kvarn.planner.result",
    "RequestOutput": "kvarn.core.requests",
    "SamplingParams": "kvarn.core.requests",
    "plan": "kvarn.planner.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvarn' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
