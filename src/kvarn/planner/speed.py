"""How fast Kvarn's own engine is on this machine: a few constants, measured once by `kvarn.bench.engine_speed` and
kept.

A decode step takes `step_s + layers * layer_s + weight bytes / weight_bytes_per_s + cache bytes / kv_bytes_per_s`; a
prompt takes its FLOPs over `prefill_flops` and a step's overheads for each chunk. Products with codes (4 and 8 bits a
weight) and with floats run through different code, so each has its own constants. The roofline says what is possible,
this what is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvarn import __version__
from kvarn.core.files import atomic_write, kvarn_home

CHUNK_TOKENS = 512
KINDS = ("codes", "floats")
_FORMAT = 2
_CODE_BYTES = 1.5  # weights that take fewer bytes each are codes


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """step_s, layer_s: fixed parts of a step. weight_bytes_per_s, kv_bytes_per_s: rates at which a decode step reads.
    prefill_flops: FLOP/s of a prompt's chunks."""

    step_s: float
    layer_s: float
    weight_bytes_per_s: float
    kv_bytes_per_s: float
    prefill_flops: float

    def decode_s(self, layers: int, weight_bytes: float, kv_bytes: float) -> float:
        """Seconds of one decode step."""
        fixed = self.step_s + layers * self.layer_s
        return fixed + weight_bytes / self.weight_bytes_per_s + kv_bytes / self.kv_bytes_per_s

    def prefill_s(self, layers: int, tokens: int, flops: float) -> float:
        """Seconds of one prompt."""
        chunks = -(-tokens // CHUNK_TOKENS)
        return flops / self.prefill_flops + chunks * (self.step_s + layers * self.layer_s)


@dataclass(frozen=True, slots=True)
class EngineSpeeds:
    """codes, floats: with weights of either kind. base_bytes: memory of a process that has loaded no model yet."""

    codes: EngineSpeed
    floats: EngineSpeed
    base_bytes: float

    def of(self, weight_width: float) -> EngineSpeed:
        """For weights that take weight_width bytes each."""
        return self.codes if weight_width < _CODE_BYTES else self.floats


def _place() -> Path:
    return kvarn_home() / "engine_speed.json"


def _identity(processor: str, cores: int) -> dict[str, Any]:
    own = {"kvarn": __version__, "environment": sys.prefix}  # another one's libraries are of another size
    return {"format": _FORMAT, "processor": processor, "cores": cores, **own}


def keep_speed(processor: str, cores: int, speeds: EngineSpeeds) -> Path:
    """Write the measurement; it holds for this processor, these cores, this version of Kvarn and the environment
    that it is installed in."""
    with atomic_write(_place()) as stream:
        stream.write(json.dumps({"identity": _identity(processor, cores), "speeds": asdict(speeds)}, indent=1).encode())
    return _place()


def kept_speed(processor: str, cores: int) -> EngineSpeeds | None:
    """The measurement of this machine, or None where there is none that holds."""
    try:
        found = json.loads(_place().read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return _speeds(found) if isinstance(found, dict) and found.get("identity") == _identity(processor, cores) else None


def _speeds(found: Mapping[str, Any]) -> EngineSpeeds | None:
    try:
        kept = found["speeds"]
        base_bytes = float(kept["base_bytes"])
        codes, floats = (EngineSpeed(**{f.name: float(kept[n][f.name]) for f in fields(EngineSpeed)}) for n in KINDS)
    except (KeyError, TypeError, ValueError):
        return None
    figures = (base_bytes, *asdict(codes).values(), *asdict(floats).values())
    return EngineSpeeds(codes, floats, base_bytes) if all(figure >= 0 for figure in figures) else None
