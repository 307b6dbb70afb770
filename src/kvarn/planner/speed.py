"""How fast Kvarn's own engine is on this machine: a few constants, measured once by `kvarn.bench.engine_speed` and
kept.

A decode step takes `step_s + layers * layer_s + weight bytes / weight_bytes_per_s + cache bytes / kv_bytes_per_s`; a
prompt takes its FLOPs over `prefill_flops` and a step's overheads for each chunk. The roofline says what is possible,
this what is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvarn import __version__
from kvarn.core.files import atomic_write, kvarn_home

CHUNK_TOKENS = 512
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """step_s, layer_s: fixed parts of a step. weight_bytes_per_s, kv_bytes_per_s: rates at which a decode step reads.
    prefill_flops: FLOP/s of a prompt's chunks. base_bytes: memory of a process that has loaded no model yet."""

    step_s: float
    layer_s: float
    weight_bytes_per_s: float
    kv_bytes_per_s: float
    prefill_flops: float
    base_bytes: float

    def decode_s(self, layers: int, weight_bytes: float, kv_bytes: float) -> float:
        """Seconds of one decode step."""
        fixed = self.step_s + layers * self.layer_s
        return fixed + weight_bytes / self.weight_bytes_per_s + kv_bytes / self.kv_bytes_per_s

    def prefill_s(self, layers: int, tokens: int, flops: float) -> float:
        """Seconds of one prompt."""
        chunks = -(-tokens // CHUNK_TOKENS)
        return flops / self.prefill_flops + chunks * (self.step_s + layers * self.layer_s)


def _place() -> Path:
    return kvarn_home() / "engine_speed.json"


def _identity(processor: str, cores: int) -> dict[str, Any]:
    return {"format": _FORMAT, "processor": processor, "cores": cores, "kvarn": __version__}


def keep_speed(processor: str, cores: int, speed: EngineSpeed) -> Path:
    """Write the measurement; it holds for this processor, these cores and this version of Kvarn."""
    with atomic_write(_place()) as stream:
        stream.write(json.dumps({"identity": _identity(processor, cores), "speed": asdict(speed)}, indent=1).encode())
    return _place()


def kept_speed(processor: str, cores: int) -> EngineSpeed | None:
    """The measurement of this machine, or None where there is none that holds."""
    try:
        found = json.loads(_place().read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return _speed(found) if isinstance(found, dict) and found.get("identity") == _identity(processor, cores) else None


def _speed(found: Mapping[str, Any]) -> EngineSpeed | None:
    try:
        figures = {f.name: float(found["speed"][f.name]) for f in fields(EngineSpeed)}
    except (KeyError, TypeError, ValueError):
        return None
    return EngineSpeed(**figures) if all(value >= 0 for value in figures.values()) else None
