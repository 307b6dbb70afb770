"""The memory of one device, term by term; the terms and what is free add up to the device.

Each term says how sure it is: exact (follows from shapes), estimated (a central value and a range) or unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvarn.core.errors import UnknownName
from kvarn.core.geometry import ModelGeometry
from kvarn.core.specs import LayerSpec
from kvarn.planner.formats import row_format
from kvarn.planner.profiles.base import Profile, Split
from kvarn.planner.ranks import stage_sizes
from kvarn.planner.settings import Settings

Certainty = Literal["exact", "estimated", "unknown"]


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a device's memory. low, high: the range of an estimate, equal to bytes where exact. how: in words."""

    name: str
    bytes: int
    certainty: Certainty
    low: int
    high: int
    how: str = ""


def exact(name: str, nbytes: int, how: str = "") -> Term:
    return Term(name, nbytes, "exact", nbytes, nbytes, how)


def estimated(name: str, low: int, high: int, how: str, central: int | None = None) -> Term:
    return Term(name, (low + high) // 2 if central is None else central, "estimated", low, high, how)


# Bits a weight: those of the linear layers; quantized files keep embeddings, norms and heads wider, hence the range.
_WEIGHT_BITS = {
    "f32": 32.0,
    "bf16": 16.0,
    "f16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "int4": 4.25,
    "nvfp4": 4.5,
    "mxfp4": 4.25,
    "q8_0": 8.5,
    "q6_k": 6.5625,
    "q5_k": 5.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_k": 4.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "q3_k": 3.4375,
    "q2_k": 2.625,
    "iq4_nl": 4.5,
}
_WEIGHT_ALIASES = {
    "float32": "f32",
    "fp32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "float8_e4m3fn": "fp8",
    "awq": "int4",
    "gptq": "int4",
    "w4a16": "int4",
    "w8a8": "int8",
    "q4_k_m": "q4_k",
    "q4_k_s": "q4_k",
    "q5_k_m": "q5_k",
    "q5_k_s": "q5_k",
    "q3_k_m": "q3_k",
}
WIDE_TYPES = frozenset({"f32", "bf16", "f16"})
WEIGHT_FORMATS = tuple(_WEIGHT_BITS)


def weight_bits(name: str) -> tuple[str, float]:
    """The plain name of a weight format and its bits a weight. Raises UnknownName."""
    key = name.lower()
    key = _WEIGHT_ALIASES.get(key, key)
    if key not in _WEIGHT_BITS:
        raise UnknownName("weight format", name, (*_WEIGHT_BITS, *_WEIGHT_ALIASES))
    return key, _WEIGHT_BITS[key]


def published(geometry: ModelGeometry) -> str:
    """The format of the weights as published."""
    return geometry.weight_format or geometry.dtype


def model_weights(geometry: ModelGeometry, weights: str | None) -> Term:
    """All weights of the model, on however many devices. As stored (header or index) where no format was asked."""
    stored, counted = geometry.stored_weight_bytes, geometry.parameters
    if stored is not None and weights in (None, "native", "auto"):
        kinds = ", ".join(f"{name} {nbytes:,} B" for name, nbytes in geometry.weight_bytes)
        return exact("weights", stored, f"as stored: {kinds}")
    if counted is None:
        return Term("weights", 0, "unknown", 0, 0, "the config does not say enough to count parameters")
    name, bits = weight_bits(published(geometry) if weights in (None, "native", "auto") else weights)
    nbytes = int(counted.total * bits) // 8
    if name in WIDE_TYPES:
        return exact("weights", nbytes, f"{counted.total:,} parameters x {bits / 8:g} B ({name})")
    tables = (counted.embedding + counted.output) * (16 - bits) / 8
    how = f"{counted.total:,} parameters x {bits:g} bits ({name}); up to all embeddings and heads wider"
    return estimated("weights", nbytes, int(nbytes + max(0.0, tables) + 0.02 * nbytes), how)


def rank_weights(geometry: ModelGeometry, whole: Term, stage: int, settings: Settings) -> Term:
    """One rank's share: a stage's layers, the embedding on the first and the head on the last, divided by tp."""
    tp, pp, counted = settings.tp, settings.pp, geometry.parameters
    if tp * pp == 1 or whole.certainty == "unknown":
        return whole
    share = 1 / (tp * pp)
    if counted is not None and pp > 1:
        layers = stage_sizes(len(geometry.layers), pp)[stage] / len(geometry.layers)
        part = (counted.layers + counted.experts) * layers
        part += counted.embedding if stage == 0 else 0
        part += (counted.output or counted.embedding) if stage == pp - 1 else 0
        share = part / counted.total / tp
    central = int(whole.bytes * share)
    how = f"{share:.4f} of {whole.bytes:,} B: divided over {tp} x {pp} ranks; norms and routers are kept by each"
    return estimated("weights", int(whole.low * share), int(whole.high * share * 1.02), how, central)


def _width(layers: tuple[LayerSpec, ...]) -> int:
    """Numbers of Q, K and V of the widest layer."""
    return max((s.query_heads * (s.k_dim + s.v_dim) + s.kv_heads * (s.k_dim + s.v_dim) for s in layers), default=0)


def activations(geometry: ModelGeometry, rank: tuple[LayerSpec, ...], settings: Settings) -> Term:
    """Activations of the largest step: the residual stream and its copies, one layer's attention and feed-forward."""
    tokens = settings.batched_tokens or 512
    wide = row_format(geometry.dtype).group_bytes if geometry.dtype in _WEIGHT_ALIASES else 2
    width = 4 * geometry.hidden_size + _width(rank) + 3 * geometry.intermediate_size // settings.tp
    low = tokens * width * wide
    how = f"{tokens:,} tokens x (4 x {geometry.hidden_size} residual + attention + 3 x feed-forward) x {wide} B"
    return estimated("activations", low, int(2.5 * low), how, int(1.3 * low))


def logits(geometry: ModelGeometry, profile: Profile, settings: Settings) -> Term:
    """Logits in float32: of every token of a micro-batch (llama.cpp), else of one token a sequence."""
    whole = profile.name in ("llama.cpp", "ollama")
    rows = settings.batched_tokens or 512 if whole else max(settings.batch, settings.sequences)
    nbytes = rows * geometry.vocab_size * 4
    return estimated("logits", nbytes, 2 * nbytes, f"{rows:,} rows x {geometry.vocab_size:,} x 4 B", nbytes)


def cache_terms(held: Split, padding: str = "") -> tuple[Term, ...]:
    """K, V and state, each exact."""
    parts = (("KV cache: K", held.k), ("KV cache: V", held.v), ("recurrent state", held.state))
    return tuple(exact(name, nbytes, padding) for name, nbytes in parts if nbytes)


def other_terms(
    geometry: ModelGeometry, profile: Profile, rank: tuple[LayerSpec, ...], settings: Settings, accelerator: bool
) -> tuple[Term, ...]:
    """What is neither weights nor cache: activations, logits, runtime, graphs."""
    low, high = profile.runtime_bytes
    found = [activations(geometry, rank, settings), logits(geometry, profile, settings)]
    found.append(estimated("runtime", low, high, "libraries, contexts and buffers of the engine and its driver"))
    low, high = profile.graph_bytes
    if high and accelerator and settings.graphs is not False:
        found.append(estimated("graphs", low, high, "captured graphs; none with eager execution"))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Memory that an engine leaves for its cache on one device. low, high: over the range of the estimates. reserve:
    what the engine leaves to others; with it the terms, the cache and what is free add up to the device."""

    bytes: int
    low: int
    high: int
    how: str
    reserve: Term | None = None


def cache_budget(profile: Profile, settings: Settings, device_bytes: int, fixed: tuple[Term, ...]) -> CacheBudget:
    """What is left for the cache once `fixed` (everything but the cache) stands, by the engine's own rule."""
    if settings.kv_memory_bytes is not None:
        n = settings.kv_memory_bytes
        return CacheBudget(n, n, n, "asked for")
    fraction = profile.fraction if settings.memory_fraction is None else settings.memory_fraction
    counted = fixed
    if profile.budget == "static":  # SGLang: activations and graphs live in what the fraction leaves out
        counted = tuple(t for t in fixed if t.name in ("weights", "runtime"))

    def left(used: int) -> int:
        if profile.budget in ("total", "static"):
            return max(0, int(device_bytes * fraction) - used)
        if profile.budget == "free":
            return max(0, int((device_bytes - used) * fraction))
        return max(0, device_bytes - used - profile.margin_bytes)

    how = {
        "total": f"{fraction:g} x device - everything else",
        "static": f"{fraction:g} x device - weights - runtime",
        "free": f"{fraction:g} x (device - everything else)",
        "all": f"device - everything else - a margin of {profile.margin_bytes:,} B",
    }[profile.budget]
    room, used = left(sum(t.bytes for t in counted)), sum(t.bytes for t in fixed)
    reserve = exact("left to others", max(0, device_bytes - used - room), how) if used < device_bytes else None
    return CacheBudget(
        room,
        left(sum(t.high for t in counted)),
        left(sum(t.low for t in counted)),
        how,
        reserve,
    )
