"""Geometries and plans for the planner's tests."""

from __future__ import annotations

from typing import Any

from kvarn.core.geometry import ModelGeometry, ParameterCount
from kvarn.core.specs import LayerSpec, StateTensor
from kvarn.planner.api import ask
from kvarn.planner.compute import Case, build_case
from kvarn.planner.engines import load_engine
from kvarn.planner.profiles.base import EngineCache
from kvarn.planner.roofline import Device
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import GIB

H100 = Device("H100", 80 * 10**9, 3.35e12, {"bf16": 989e12, "fp8": 1979e12}, 450e9, source="test")


def attention(n: int, query_heads: int, kv_heads: int, dim: int, **more: Any) -> tuple[LayerSpec, ...]:
    """Equal attention layers."""
    return (LayerSpec(kv_heads=kv_heads, k_dim=dim, v_dim=dim, query_heads=query_heads, **more),) * n


def latent(n: int, query_heads: int = 128, **more: Any) -> tuple[LayerSpec, ...]:
    """MLA layers of DeepSeek-V3's dims, with the dims of its heads as old engines expand them."""
    return (LayerSpec(latent_dim=512, rope_dim=64, query_heads=query_heads, k_dim=192, v_dim=128, **more),) * n


def delta_net(n: int, value_heads: int, key_heads: int = 16, dim: int = 128) -> tuple[LayerSpec, ...]:
    """Gated DeltaNet layers (Qwen3-Next and later): kernel 4, so three columns of convolution state."""
    conv = StateTensor("conv", (2 * key_heads + value_heads) * dim * 3, "bfloat16", 3)
    return (LayerSpec(state=(conv, StateTensor("ssm", value_heads * dim * dim, "float32"))),) * n


def model(layers: tuple[LayerSpec, ...], parameters: int | None = None, **more: Any) -> ModelGeometry:
    """A geometry of these layers."""
    counted = ParameterCount(0, 0, parameters) if parameters else None
    values = {"hidden_size": 4096, "vocab_size": 32000, "parameters": counted} | more
    return ModelGeometry("test", layers, **values)


LLAMA_2_7B = model(
    attention(32, 32, 32, 128),
    6_738_415_616,
    dtype="float16",
    intermediate_size=11008,
    max_context=4096,
    name="llama-2-7b",
)
LLAMA_2_70B = model(
    attention(80, 64, 8, 128),
    68_976_648_192,
    dtype="float16",
    hidden_size=8192,
    intermediate_size=28672,
    max_context=4096,
)
LLAMA_3_8B = model(
    attention(32, 32, 8, 128), 8_030_261_248, intermediate_size=14336, vocab_size=128256, max_context=131072
)
QWEN_27B = model(attention(16, 24, 4, 256) + delta_net(48, 48), 27 * 10**9)
GEMMA_31B = model(attention(50, 32, 16, 256, window_tokens=1024) + attention(10, 32, 4, 512), 31 * 10**9)


def case_of(geometry: ModelGeometry, engine: str, **figures: Any) -> Case:
    """A case of an engine, with figures as `kvarn.plan` takes them and Settings fields under `fields`."""
    profile, version = load_engine(engine)
    return build_case(geometry, profile, ask(geometry, profile, version, **figures))


def cache_of(geometry: ModelGeometry, engine: str, **fields: Any) -> EngineCache:
    """The first stage's rank in an engine, by Settings fields."""
    profile, version = load_engine(engine)
    return build_case(geometry, profile, Settings(**({"context_tokens": 4096} | fields), version=version)).stages[0]


def printed(cache: EngineCache, available_gib: float = 0.0) -> dict[str, str]:
    """What the engine prints, by name."""
    return {f.name: f.text for f in cache.figures(int(available_gib * GIB))}
