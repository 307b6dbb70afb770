"""The memory of one device, term by term; the terms and what is free add up to the device.

Each term says how sure it is: exact (follows from shapes), estimated (a central value and a range) or unknown."""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.core.geometry import ModelGeometry
from kvarn.core.specs import LayerSpec
from kvarn.planner.profiles.base import Profile, Split
from kvarn.planner.roofline import Device
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import MIB
from kvarn.planner.terms import Term, estimated, exact


def _width(layers: tuple[LayerSpec, ...]) -> int:
    """Numbers of Q, K and V of the widest layer."""
    return max((s.query_heads * (s.k_dim + s.v_dim) + s.kv_heads * (s.k_dim + s.v_dim) for s in layers), default=0)


def activations(geometry: ModelGeometry, rank: tuple[LayerSpec, ...], settings: Settings) -> Term:
    """Activations of the largest step: the residual stream and its copies, one layer's attention and feed-forward."""
    tokens = settings.batched_tokens or 512
    wide = 4 if geometry.dtype == "float32" else 2
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


LEFT_TO_OTHERS = "left to others"
# A process with PyTorch on a CPU before it loads a model, and a vocabulary's tokenizer; measured with Kvarn 0.1.
CPU_BASE_BYTES = 235 * MIB
ALLOCATOR_BYTES = 8 * MIB  # what the allocator keeps of buffers that loading used
TOKENIZER_BYTES_PER_TOKEN = 1000


def own_terms(geometry: ModelGeometry, base_bytes: float | None) -> list[Term]:
    """What a Kvarn process on a CPU takes beside weights and cache: libraries and tokenizer, and the pages of the
    model's file that are mapped while it loads (the system takes them back when it needs them)."""
    base = int(base_bytes or CPU_BASE_BYTES) + ALLOCATOR_BYTES
    tokenizer = geometry.vocab_size * TOKENIZER_BYTES_PER_TOKEN
    how = f"libraries {base:,} B + tokenizer of {geometry.vocab_size:,} tokens, about {tokenizer:,} B"
    found = [estimated("runtime", int(0.85 * base + 0.6 * tokenizer), int(1.15 * base + 1.4 * tokenizer), how)]
    if file_bytes := geometry.stored_weight_bytes:
        found.append(estimated("file while loading", 0, file_bytes, "mapped pages of the model's file", file_bytes))
    return found


def other_terms(
    geometry: ModelGeometry, profile: Profile, rank: tuple[LayerSpec, ...], settings: Settings, device: Device
) -> tuple[Term, ...]:
    """What is neither weights nor cache: activations, logits, runtime, graphs."""
    low, high = profile.runtime_bytes
    found = [activations(geometry, rank, settings), logits(geometry, profile, settings)]
    if profile.name == "kvarn" and not device.accelerator:
        return (*found, *own_terms(geometry, device.kvarn.base_bytes if device.kvarn else None))
    found.append(estimated("runtime", low, high, "libraries, contexts and buffers of the engine and its driver"))
    low, high = profile.graph_bytes
    if high and device.accelerator and settings.graphs is not False:
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
    reserve = exact(LEFT_TO_OTHERS, max(0, device_bytes - used - room), how) if used < device_bytes else None
    return CacheBudget(
        room,
        left(sum(t.high for t in counted)),
        left(sum(t.low for t in counted)),
        how,
        reserve,
    )
