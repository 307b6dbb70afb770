"""Laws that every plan obeys, whatever the model, engine and settings."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn.core.errors import KvarnError
from kvarn.core.geometry import ModelGeometry
from kvarn.planner.api import plan
from kvarn.planner.compute import build_case
from kvarn.planner.engines import engine_names, load_engine
from kvarn.planner.profiles.base import EngineCache
from kvarn.planner.result import Plan
from kvarn.planner.settings import Settings
from support.planning import H100, attention, delta_net, latent, model

ENGINES = st.sampled_from(engine_names())
FORMATS = {"kvarn": ("bfloat16", "int8"), "llama.cpp": ("f16", "q8_0"), "ollama": ("f16", "q4_0"), "mlc": ("f16",)}


@st.composite
def geometries(draw: st.DrawFn) -> ModelGeometry:
    """Dense, windowed, latent and hybrid models whose heads divide by powers of two."""
    heads = 2 ** draw(st.integers(0, 5))
    kv_heads = 2 ** draw(st.integers(0, heads.bit_length() - 1))
    dim = draw(st.sampled_from((64, 128)))
    layers = attention(draw(st.integers(1, 12)), max(heads, 32), kv_heads, dim)
    kind = draw(st.sampled_from(("plain", "window", "latent", "state")))
    if kind == "window":
        layers += attention(
            draw(st.integers(1, 12)), max(heads, 32), kv_heads, dim, window_tokens=draw(st.integers(16, 5000))
        )
    elif kind == "latent":
        layers = latent(draw(st.integers(1, 12)))
    elif kind == "state":
        layers += delta_net(draw(st.integers(1, 12)), 32)
    return model(layers, 10**9)


def cache(geometry: ModelGeometry, engine: str, kv: str | None = None, **fields: int) -> EngineCache:
    profile, _ = load_engine(engine)
    asked = Settings(**({"context_tokens": 4096, "kv_k": kv, "kv_v": kv} | fields))
    return build_case(geometry, profile, asked).stages[0]


@given(
    geometries(),
    ENGINES,
    st.integers(1, 200_000),
    st.integers(0, 5000),
    st.integers(1, 64),
    st.integers(0, 9),
    st.booleans(),
)
@settings(max_examples=150)
def test_bytes_grow_with_context_and_batch(
    geometry: ModelGeometry, engine: str, tokens: int, more: int, sequences: int, others: int, quantized: bool
) -> None:
    names = FORMATS.get(engine, ("bf16", "fp8"))
    found = cache(geometry, engine, names[-1] if quantized else names[0])
    held = found.held(sequences, tokens)
    assert held.total <= found.held(sequences, tokens + more).total
    assert held.total <= found.held(sequences + others, tokens).total
    assert min(held.k, held.v, held.state) >= 0


@given(geometries(), ENGINES, st.integers(1, 60_000))
@settings(max_examples=80)
def test_bytes_grow_with_layers_and_heads(geometry: ModelGeometry, engine: str, tokens: int) -> None:
    deeper = replace(geometry, layers=geometry.layers * 2)
    assert cache(geometry, engine).held(1, tokens).total <= cache(deeper, engine).held(1, tokens).total
    wider = replace(
        geometry,
        layers=tuple(replace(s, kv_heads=s.kv_heads * 2, query_heads=s.query_heads * 2) for s in geometry.layers),
    )
    assert cache(geometry, engine).held(1, tokens).total <= cache(wider, engine).held(1, tokens).total


@given(geometries(), ENGINES, st.integers(1, 60_000), st.integers(1, 16), st.integers(0, 4))
@settings(max_examples=150)
def test_tensor_parallel_never_increases_a_rank(
    geometry: ModelGeometry, engine: str, tokens: int, sequences: int, power: int
) -> None:
    one, many = cache(geometry, engine), cache(geometry, engine, tp=2**power)
    assert many.growth().total <= one.growth().total
    slack = 0 if engine != "vllm" else one.held(1, 1).total * sequences  # a larger block rounds further up
    assert many.held(sequences, tokens).total <= one.held(sequences, tokens).total + slack


@given(geometries(), ENGINES, st.integers(2**24, 2**37), st.integers(1, 9))
@settings(max_examples=100)
def test_capacity_is_the_inverse_of_bytes(geometry: ModelGeometry, engine: str, room: int, sequences: int) -> None:
    found = cache(geometry, engine)
    longest = found.longest(room, sequences)
    if longest:
        assert found.held(sequences, longest).total <= room
    if found.growth().total and longest < 2**39:
        block = max(256, getattr(found, "block_tokens", 1))
        assert found.held(sequences, longest + block).total > room
    assert found.tokens(room) >= 0
    assert found.concurrency(room, 1024) <= found.concurrency(2 * room, 1024)


@given(geometries(), ENGINES, st.integers(1, 300_000), st.integers(1, 64), st.sampled_from((1, 2, 4)), st.booleans())
@settings(max_examples=80)
def test_a_plan_adds_up_and_comes_back_from_json(
    geometry: ModelGeometry, engine: str, context: int, sequences: int, tp: int, on_device: bool
) -> None:
    device = H100 if on_device else None
    found = plan(geometry, device, context=context, concurrency=sequences, engine=engine, tp=tp)
    kv = found.kv
    assert kv.bytes_total == kv.k_bytes + kv.v_bytes + kv.state_bytes
    assert kv.rank.bytes_total == kv.rank.k_bytes + kv.rank.v_bytes + kv.rank.state_bytes
    assert Plan.from_json(found.to_json()) == found
    if found.device is not None:
        assert sum(t.bytes for t in found.terms) + found.device.free_bytes == H100.memory_bytes
    for term in found.terms:
        assert term.low <= term.bytes <= term.high
        assert term.low == term.high or term.certainty == "estimated"


@given(st.text(max_size=30), st.text(max_size=10), st.integers(-5, 5))
@settings(max_examples=80)
def test_bad_figures_are_refused_by_name(text: str, size: str, count: int) -> None:
    """Whatever is asked, the answer is a plan or one of Kvarn's own errors."""
    geometry = model(attention(2, 8, 2, 64))
    try:
        plan(geometry, context=text, kv_memory=size or None, tp=count, kv=text or None)
    except KvarnError:
        return
    plan(geometry)
