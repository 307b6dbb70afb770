"""The worked examples, to the byte, through the planner's own door."""

from __future__ import annotations

import pytest

from kvarn.core.geometry import geometry_from_factors
from kvarn.planner.api import plan
from support.planning import LLAMA_2_7B, LLAMA_2_70B, LLAMA_3_8B, attention, model


def test_llama_2_7b() -> None:
    one, many = plan(LLAMA_2_7B, context=4096), plan(LLAMA_2_7B, context=4096, batch=32)
    assert one.kv.bytes_per_sequence == one.kv.bytes_total == 2_147_483_648
    assert many.kv.bytes_total == 68_719_476_736
    assert one.kv.k_bytes == one.kv.v_bytes == 2_147_483_648 // 2


def test_llama_2_70b_needs_less_than_7b() -> None:
    large, small = plan(LLAMA_2_70B, context=4096), plan(LLAMA_2_7B, context=4096)
    assert large.kv.bytes_per_sequence == 1_342_177_280 < small.kv.bytes_per_sequence


def test_llama_3_8b_and_its_two_units() -> None:
    found = plan(LLAMA_3_8B, context="128k")
    assert found.kv.bytes_per_sequence == 17_179_869_184
    assert "16.00 GiB = 17.18 GB" in found.reason


def test_the_claim_of_160_gb() -> None:
    found = plan(geometry_from_factors(40, 32, 128, dtype="float16"), context=2048)
    assert found.kv.bytes_per_sequence == 1_342_177_280


@pytest.mark.parametrize(("kv_heads", "share"), [(32, 1.0), (8, 0.25), (1, 1 / 32)])
def test_the_cache_scales_with_kv_heads(kv_heads: int, share: float) -> None:
    whole, fewer = plan(model(attention(32, 32, 32, 128))), plan(model(attention(32, 32, kv_heads, 128)))
    assert fewer.kv.bytes_per_token == share * whole.kv.bytes_per_token


@pytest.mark.parametrize("engine", ["kvarn", "vllm", "sglang", "llama.cpp", "tensorrt-llm", "ollama", "mlc"])
def test_engines_agree_on_plain_attention(engine: str) -> None:
    assert plan(LLAMA_3_8B, context="128k", engine=engine).kv.bytes_per_sequence == 17_179_869_184
