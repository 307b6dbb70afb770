"""The classic mistakes of KV arithmetic, one test each: what is right, and that the wrong figure does not come out."""

from __future__ import annotations

import pytest

from kvarn.core.errors import IncompatiblePlan
from kvarn.planner.api import plan
from kvarn.planner.sizes import GIB, show_both
from support.planning import (
    GEMMA_31B,
    H100,
    LLAMA_2_7B,
    LLAMA_3_8B,
    QWEN_27B,
    attention,
    cache_of,
    delta_net,
    latent,
    model,
    printed,
)

ENGINES = ("kvarn", "vllm", "sglang", "llama.cpp", "tensorrt-llm", "ollama", "mlc")


def test_head_dim_is_stated_not_hidden_over_heads() -> None:
    """Qwen3-0.6B: hidden 1024 over 16 heads is 64, its heads are 128 wide."""
    found = plan(model(attention(28, 16, 8, 128), hidden_size=1024))
    assert found.kv.bytes_per_token == 114_688 != 28 * 2 * 8 * 64 * 2


def test_gqa_is_not_ignored() -> None:
    assert plan(LLAMA_3_8B).kv.bytes_per_token * 4 == plan(model(attention(32, 32, 32, 128))).kv.bytes_per_token


def test_mha_is_not_taken_for_gqa() -> None:
    """Command-R v01 has 64 KV heads: 8 times a guess of 8."""
    assert plan(model(attention(40, 64, 64, 128))).kv.bytes_per_token == 1_310_720


def test_gib_and_gb_stay_apart() -> None:
    assert show_both(17_179_869_184) == "16.00 GiB = 17.18 GB"


def test_kv_heads_are_not_divided_past_one() -> None:
    """Two KV heads on four ranks: one head each, kept twice."""
    found = plan(model(attention(52, 32, 2, 128)), tp=4)
    assert found.kv.rank.bytes_per_token * 2 == found.kv.bytes_per_token
    assert any("more than 2 KV heads" in note for note in found.notes)


def test_tensor_parallel_is_applied() -> None:
    found = plan(model(attention(64, 64, 8, 128)), tp=4)
    assert found.kv.rank.bytes_per_token * 4 == found.kv.bytes_per_token


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_tensor_parallel_does_not_divide_mla(engine: str) -> None:
    found = plan(model(latent(61)), tp=8, engine=engine)
    assert found.kv.rank.bytes_per_token == found.kv.bytes_per_token == 70_272


def test_data_parallel_does_not_divide_a_request() -> None:
    found = plan(LLAMA_3_8B, dp=8, concurrency=8)
    assert found.kv.rank.bytes_per_sequence == found.kv.bytes_per_sequence
    assert found.kv.rank.bytes_total * 8 == found.kv.bytes_total


@pytest.mark.parametrize("engine", ["kvarn", "vllm", "sglang", "llama.cpp", "tensorrt-llm"])
def test_mla_is_one_latent_not_heads_and_not_doubled(engine: str) -> None:
    found = plan(model(latent(61)), engine=engine)
    assert found.kv.bytes_per_token == 61 * 576 * 2
    assert found.kv.v_bytes == 0


def test_mla_record_keeps_scales_and_rope_wide() -> None:
    assert cache_of(model(latent(1)), "sglang", kv_k="fp8").growth().total == 576
    assert cache_of(model(latent(1)), "sglang", kv_k="fp8_ds_mla").growth().total == 656
    assert cache_of(model(latent(1)), "vllm", kv_k="nvfp4_ds_mla").growth().total == 432


def test_indexer_is_counted_where_it_is_and_only_there() -> None:
    every = cache_of(model(latent(78, index_dim=128)), "sglang", kv_k="fp8").growth().total
    some = cache_of(model((*latent(21, index_dim=128), *latent(57))), "sglang", kv_k="fp8").growth().total
    assert every == 78 * (576 + 132)
    assert some == 78 * 576 + 21 * 132


@pytest.mark.parametrize("engine", ["kvarn", "vllm", "sglang", "llama.cpp", "tensorrt-llm", "ollama"])
def test_window_layers_do_not_keep_the_whole_context(engine: str) -> None:
    short, long = (plan(GEMMA_31B, context=c, engine=engine).kv for c in ("64k", "128k"))
    whole = 131072 * (50 * 16 * 512 + 10 * 4 * 1024) * 2
    assert long.bytes_per_sequence < 0.35 * whole
    assert long.bytes_per_sequence - short.bytes_per_sequence == 65536 * long.bytes_per_token


def test_window_layers_are_not_left_out_and_hold_the_batch_too() -> None:
    cache = cache_of(model(attention(30, 8, 8, 128, window_tokens=1024)), "vllm", context_tokens=131072)
    assert cache.held(1, 131072).total == (577) * 16 * 30 * 4096
    assert printed(cache)["window_blocks"] == "577"


def test_layers_may_have_different_head_counts() -> None:
    lfm = model((*attention(6, 32, 8, 64), *model(()).layers, *delta_net(10, 16)))
    assert plan(lfm).kv.bytes_per_token == 12_288
    mixed = model((*attention(1, 16, 2, 128), *attention(1, 16, 8, 128)))
    assert plan(mixed).kv.bytes_per_token == (2 + 8) * 2 * 128 * 2


def test_shared_layers_have_no_cache_of_their_own() -> None:
    """Gemma-3n keeps 20 of 35."""
    own = attention(20, 8, 2, 256)
    shared = tuple(attention(1, 8, 2, 256, shares_layer=19)[0] for _ in range(15))
    for engine in ENGINES:
        assert plan(model(own + shared), engine=engine).kv.bytes_per_token == 20 * 2 * 2 * 256 * 2


def test_linear_layers_are_not_attention() -> None:
    assert plan(QWEN_27B, engine="vllm").kv.bytes_per_token == 65_536  # 16 of 64 layers


@pytest.mark.parametrize("engine", ["kvarn", "vllm", "sglang", "llama.cpp", "tensorrt-llm"])
def test_state_is_not_forgotten(engine: str) -> None:
    found = plan(QWEN_27B, engine=engine, concurrency=8)
    assert found.kv.state_bytes >= 8 * 48 * 48 * 128 * 128 * 4
    assert found.kv.bytes_total == found.kv.k_bytes + found.kv.v_bytes + found.kv.state_bytes


def test_state_counts_slots_and_drafts() -> None:
    one, seven = (cache_of(QWEN_27B, "llama.cpp", draft_tokens=n).held(1, 4096).state for n in (0, 6))
    assert seven == 7 * one


def test_a_hybrid_may_save_nothing() -> None:
    """Falcon-H1: attention and state in every layer."""
    layer = attention(1, 12, 2, 128, state=delta_net(1, 16)[0].state)[0]
    found = plan(model((layer,) * 24))
    assert found.kv.bytes_per_token == 24 * 2 * 2 * 128 * 2
    assert found.kv.state_bytes > 0


def test_quantized_is_not_bits_over_eight() -> None:
    f16, q4 = (cache_of(LLAMA_3_8B, "llama.cpp", kv_k=k, kv_v=k).growth().total for k in ("f16", "q4_0"))
    assert f16 / q4 == pytest.approx(3.556, abs=1e-3)
    nvfp4 = cache_of(LLAMA_3_8B, "vllm", kv_k="nvfp4").growth().total
    assert f16 / nvfp4 == pytest.approx(3.556, abs=1e-3)
    scaled = cache_of(LLAMA_3_8B, "vllm", kv_k="int8_per_token_head").growth().total
    assert scaled == f16 // 2 + 32 * 2 * 8 * 4


def test_kv_type_does_not_follow_the_weights() -> None:
    found = plan(LLAMA_3_8B, "custom:80GB", weights="int4")
    assert found.kv.k_format == "bfloat16"
    assert found.kv.bytes_per_token == 131_072


def test_cache_of_llama_cpp_is_f16_by_default() -> None:
    assert plan(LLAMA_3_8B, engine="llama.cpp").kv.k_format == "f16"
    assert plan(model(attention(1, 1, 1, 64), dtype="float32"), engine="llama.cpp").kv.bytes_per_token == 256


def test_blocks_and_cells_round_up() -> None:
    assert cache_of(LLAMA_3_8B, "llama.cpp").held(1, 80_000).total == 80_128 * 131_072
    assert plan(LLAMA_3_8B, context=1000).kv.bytes_per_sequence == 1024 * 131_072


def test_the_pool_is_the_minimum_over_stages() -> None:
    """81 layers on two stages: the fuller one decides."""
    found = plan(model(attention(81, 64, 8, 128), 70 * 10**9), H100, pp=2)
    assert found.kv.rank.bytes_per_token == 41 * 4096
    assert found.kv.bytes_per_token == 81 * 4096


def test_fraction_of_free_is_not_fraction_of_total() -> None:
    free, total = (plan(LLAMA_2_7B, H100, engine=e).cache_bytes or 0 for e in ("tensorrt-llm", "vllm"))
    assert free > total > 0
    assert free == pytest.approx(
        0.9 * (H100.memory_bytes - _fixed(plan(LLAMA_2_7B, H100, engine="tensorrt-llm"))), rel=1e-6
    )


def _fixed(found) -> int:
    return sum(t.bytes for t in found.terms if not t.name.startswith(("KV", "left")))


def test_logits_and_batched_tokens_are_not_free() -> None:
    """Gemma-1.1-2B: 256,000 x 512 x 4 B are 500 of the 504 MiB of its compute buffer."""
    gemma = model(attention(18, 8, 1, 256), 2 * 10**9, vocab_size=256_000, hidden_size=2048)
    term = next(t for t in plan(gemma, H100, engine="llama.cpp").terms if t.name == "logits")
    assert term.bytes == 500 * 2**20
    small, large = (
        plan(LLAMA_3_8B, H100, engine="vllm", flags=["--max-num-batched-tokens", n]).cache_bytes or 0
        for n in ("2048", "32768")
    )
    assert large < small - GIB


def test_graphs_and_runtime_are_counted_and_said_to_be_estimates() -> None:
    terms = {t.name: t for t in plan(LLAMA_3_8B, H100, engine="vllm").terms}
    assert terms["graphs"].certainty == terms["runtime"].certainty == "estimated"
    assert terms["graphs"].low < terms["graphs"].bytes < terms["graphs"].high
    assert "graphs" not in {t.name for t in plan(LLAMA_3_8B, H100, engine="vllm", flags=["--enforce-eager"]).terms}


def test_the_trained_context_is_not_the_default() -> None:
    assert plan(LLAMA_3_8B).context == 8192
    assert plan(LLAMA_2_7B).context == 4096


def test_context_beyond_the_model_is_said_and_computed() -> None:
    found = plan(LLAMA_2_7B, context=8192)
    assert found.kv.bytes_per_sequence == 2 * 2_147_483_648
    assert any("beyond the 4,096 tokens" in note for note in found.notes)


@pytest.mark.parametrize("tp", [3, 5, 24, 64])
def test_tensor_parallel_that_divides_nothing(tp: int) -> None:
    with pytest.raises(IncompatiblePlan, match=str(tp)):
        plan(LLAMA_3_8B, tp=tp)
