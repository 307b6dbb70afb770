"""How fast prefill and decode can be at best: FLOPs over peak, bytes over bandwidth, whichever is longer.

Williams, Waterman, Patterson, "Roofline" (CACM 2009). Prefill reads the weights once for the whole prompt and is
bound by FLOP/s; decode reads them, and all cached keys and values, for every step and is bound by bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvarn.core.geometry import ModelGeometry
from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.planner.settings import Settings
from kvarn.planner.speed import EngineSpeeds


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or machine.

    flops: dense FLOP/s by number type ('bf16', 'fp8', ...). link_bytes_per_s: between devices, one direction, None if
    unstated. accelerator: not the CPU itself. measured: figures come from this machine. kvarn: how fast Kvarn's own
    engine was measured to be on it.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float | None = None
    flops: Mapping[str, float] = field(default_factory=dict)
    link_bytes_per_s: float | None = None
    accelerator: bool = True
    measured: bool = False
    source: str = ""
    kvarn: EngineSpeeds | None = None

    def peak(self, name: str) -> float | None:
        """Dense FLOP/s of a number type; of the next wider one where it is not stated."""
        order = ("fp4", "fp8", "int8", "bf16", "f16", "fp16", "tf32", "f32", "fp32")
        start = order.index(name) if name in order else 3
        return next((self.flops[n] for n in order[start:] if self.flops.get(n)), None)


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes of one pass. kv_bytes: cache read; weight_bytes: weights read; comm_bytes: sent by each
    device."""

    flops: float
    weight_bytes: float
    kv_bytes: float
    comm_bytes: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Lower bounds in seconds by resource; `seconds` is the largest of compute and memory, plus the interconnect."""

    compute_s: float
    memory_s: float
    link_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s) + self.link_s

    @property
    def bound_by(self) -> str:
        sides = {"compute": self.compute_s, "memory": self.memory_s, "interconnect": self.link_s}
        return max(sides, key=lambda side: sides[side])


def seen_tokens(spec: LayerSpec, first: int, count: int) -> int:
    """Keys that `count` queries at positions first, first + 1, ... attend to, summed."""
    last = first + count
    window = spec.window_tokens or spec.chunk_tokens
    if window is None or last <= window:
        return count * first + count * (count + 1) // 2
    growing = max(0, min(count, window - first))
    return growing * first + growing * (growing + 1) // 2 + (count - growing) * window


def attention_dims(spec: LayerSpec, queries: int = 1) -> int:
    """Multiply-adds of one query over one key and value, all query heads. MLA decodes in its absorbed form, over
    latents; a prompt is cheaper with keys and values expanded."""
    absorbed = 2 * spec.latent_dim + spec.rope_dim
    expanded = spec.k_dim + spec.v_dim
    if spec.latent_dim:
        return spec.query_heads * (min(absorbed, expanded) if queries > 1 and expanded else absorbed)
    return spec.query_heads * expanded


def attention_flops(layers: tuple[LayerSpec, ...], first: int, count: int) -> int:
    """FLOPs of QK^T and PV over all layers; a layer that shares a cache still attends."""
    return sum(
        2 * attention_dims(s, count) * seen_tokens(s, first, count) for s in layers if s.kind is not LayerKind.NONE
    )


def weights_seen(geometry: ModelGeometry, rows: int) -> tuple[float, float]:
    """Parameters multiplied with one token, and parameters read for a step of `rows` tokens (without the embedding
    table). Of n experts with k active, 1 - (1 - k/n)^rows are expected to be touched when tokens choose alike."""
    p = geometry.parameters
    if p is None:
        return 0.0, 0.0
    head = p.output or geometry.vocab_size * geometry.hidden_size
    share = geometry.experts_active / geometry.experts if geometry.experts else 0.0
    touched = 1 - (1 - share) ** rows if share else 0.0
    return float(p.layers + p.active_experts), p.layers + head + p.experts * touched


def prefill_work(geometry: ModelGeometry, settings: Settings, tokens: int, bytes_per_weight: float) -> Work:
    """One prompt of `tokens`; logits of its last token only."""
    multiplied, read = weights_seen(geometry, tokens)
    head = geometry.vocab_size * geometry.hidden_size
    flops = 2 * multiplied * tokens + 2 * head + attention_flops(geometry.layers, 0, tokens)
    return Work(flops, read * bytes_per_weight, 0.0, _comm(geometry, settings, tokens))


def decode_work(
    geometry: ModelGeometry, settings: Settings, batch: int, context: int, bytes_per_weight: float, kv_bytes: float
) -> Work:
    """One step of `batch` sequences of `context` tokens. kv_bytes: cache bytes that one sequence's step reads."""
    multiplied, read = weights_seen(geometry, batch)
    head = geometry.vocab_size * geometry.hidden_size
    flops = batch * (2 * multiplied + 2 * head + attention_flops(geometry.layers, max(0, context - 1), 1))
    return Work(flops, read * bytes_per_weight, kv_bytes * batch, _comm(geometry, settings, batch))


def _comm(geometry: ModelGeometry, settings: Settings, rows: int) -> float:
    """Bytes each device sends: two ring all-reduces a layer over tp ranks, one hand-over a pipeline stage."""
    row = 2 * geometry.hidden_size * rows
    ring = 2 * (settings.tp - 1) / settings.tp
    return 2 * len(geometry.layers) * row * ring + (settings.pp - 1) * row


def limit(work: Work, device: Device, settings: Settings, number_type: str) -> Timing | None:
    """The roofline of one pass; None where the device's figures are not known. Tensor parallel divides the work;
    pipeline stages run one after the other for a single step."""
    peak = device.peak(number_type)
    if not peak or not device.bandwidth_bytes_per_s:
        return None
    bytes_read = work.weight_bytes + work.kv_bytes
    link = work.comm_bytes / device.link_bytes_per_s if device.link_bytes_per_s and settings.devices > 1 else 0.0
    return Timing(work.flops / (peak * settings.tp), bytes_read / (device.bandwidth_bytes_per_s * settings.tp), link)
