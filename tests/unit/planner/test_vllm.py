"""vLLM's storage and reporting rules, on publicly reported figures."""

from __future__ import annotations

import pytest

from kvarn.core.specs import LayerSpec, StateTensor
from kvarn.planner.profiles.vllm import VllmCache
from kvarn.planner.sizes import GIB
from support.planning import GEMMA_31B, LLAMA_3_8B, QWEN_27B, attention, cache_of, latent, model, printed


def test_blocks_of_one_kind() -> None:
    cache = cache_of(LLAMA_3_8B, "vllm@V0 (2024-12)", context_tokens=20000)
    found = printed(cache, 3.81)
    assert (found["cpu_blocks"], found["concurrency"]) == ("2048", "1.56")
    assert cache.lines(int(3.81 * GIB))[0] == "# GPU blocks: 1950, # CPU blocks: 2048"


def test_swap_space_sets_the_cpu_blocks() -> None:
    assert printed(cache_of(LLAMA_3_8B, "vllm@0.6", swap_bytes=6 * GIB))["cpu_blocks"] == "3072"


def test_error_line_has_needed_available_and_estimated_length() -> None:
    qwen3_coder = model(attention(62, 96, 8, 128))
    cache = cache_of(qwen3_coder, "vllm@0.10.1", context_tokens=262144)
    line = cache.lines(int(48.66 * GIB))[0]
    assert "62.00 GiB KV cache" in line
    assert "48.66 GiB" in line
    assert "length is 205728" in line


def test_tokens_are_reported_by_version() -> None:
    """One storage, two reporting rules (vllm#43308): the same 24.54 GiB hold 10,051 blocks under both."""
    old, new = (cache_of(GEMMA_31B, f"vllm@{v}", context_tokens=262144) for v in ("0.20.0", "0.21.0"))
    assert old.blocks(int(24.54 * GIB)) == new.blocks(int(24.54 * GIB)) == 10051
    assert printed(old, 24.54)["tokens"] == "26,800"
    assert int(printed(new, 24.54)["tokens"].replace(",", "")) > 5 * 26_800
    assert printed(old, 24.54)["concurrency"] == printed(new, 24.54)["concurrency"]


def test_groups_are_padded_to_equal_width() -> None:
    """Gemma-3-27B: 10 full and 52 window layers are 7 groups of 10, 8 of whose places hold nothing (15.4%)."""
    cache = cache_of(model(attention(52, 32, 16, 128, window_tokens=1024) + attention(10, 32, 16, 128)), "vllm")
    assert isinstance(cache, VllmCache)
    assert (len(cache.groups), cache.width) == (7, 10)
    assert sum(cache.width - g.layers for g in cache.groups) == 8
    assert "8 layers that hold nothing" in cache.notes()[0]


@pytest.mark.parametrize(
    ("kv", "draft", "available", "block", "tokens"),
    [
        ("fp8", 3, 9.28, "1600", "265,122"),
        ("int8_per_token_head", 3, 9.67, "1584", "272,453"),
        ("int4_per_token_head", 3, 9.67, "3104", "502,667"),
    ],
)
def test_attention_blocks_grow_to_hold_a_state(kv: str, draft: int, available: float, block: str, tokens: str) -> None:
    cache = cache_of(QWEN_27B, "vllm", context_tokens=262144, kv_k=kv, kv_v=kv, draft_tokens=draft, draft_layers=1)
    found = printed(cache, available)
    assert (found["block_tokens"], found["tokens"]) == (block, tokens)


def test_state_is_divided_by_tensor_parallel() -> None:
    cache = cache_of(QWEN_27B, "vllm@2026-08", context_tokens=131072, kv_k="fp8", tp=2)
    assert printed(cache, 4.99)["tokens"] == "302,921"
    assert printed(cache, 4.99)["block_tokens"] == "1568"


@pytest.mark.parametrize(("draft", "rate", "fixed_gib"), [(3, 34_816, 0.623), (0, 32_768, 0.1436)])
def test_the_two_term_law(draft: int, rate: int, fixed_gib: float) -> None:
    """A request costs a x ceil(L / B) x B + M, and M does not depend on the length."""
    cache = cache_of(
        QWEN_27B,
        "vllm",
        context_tokens=262144,
        kv_k="fp8",
        draft_tokens=draft,
        draft_layers=draft and 1,
        state_mode="none",
    )
    assert isinstance(cache, VllmCache)
    assert cache.growth().total == rate
    for tokens in (10 * cache.block_tokens, 100 * cache.block_tokens):
        fixed = cache.held(1, tokens).total - rate * tokens
        assert fixed / GIB == pytest.approx(fixed_gib, abs=5e-4)


def test_bf16_state_and_wider_kernel_blocks() -> None:
    """784 tokens at 16, 832 at 64 (bf16 KV, fp32 state); 448 with bf16 state."""
    for fields, block in (({}, "784"), ({"kernel_tokens": 64}, "832")):
        assert printed(cache_of(QWEN_27B, "vllm", **fields))["block_tokens"] == block
    assert printed(cache_of(QWEN_27B, "vllm", kernel_tokens=64, state_dtype="bfloat16"))["block_tokens"] == "448"


def test_draft_head_adds_a_layer() -> None:
    """Cosmos-Reason2: 28 layers, 29 charged."""
    cache = cache_of(model(attention(28, 16, 8, 128)), "vllm", context_tokens=262144, draft_layers=1)
    assert printed(cache, 12.33)["needed"] == "29.00"
    low, high = (int(printed(cache, 12.33 + d)["estimated_length"]) for d in (-0.005, 0.005))
    assert low <= 111_440 <= high


def test_window_requests_hold_window_and_batch() -> None:
    """8,194 blocks: a window of 4 in blocks of 4, 16,384 batched tokens, twice under async scheduling (vllm#54703)."""
    layers = attention(1, 1, 1, 1, window_tokens=4)
    cache = cache_of(
        model(layers), "vllm", context_tokens=2**20, block_size=4, batched_tokens=16384, async_scheduling=True
    )
    assert printed(cache)["window_blocks"] == "8194"


def test_mla_was_stored_as_padded_heads_before_0_7() -> None:
    lite = model(latent(27, 16))
    assert cache_of(lite, "vllm@2024-12").growth().total == 442_368
    assert cache_of(lite, "vllm").growth().total == 27 * 576 * 2


def test_chunked_layers_are_stored_whole() -> None:
    """Llama-4-Scout at TP 8 and 1M tokens: 24 GiB, not 6 (vllm#16118)."""
    scout = model(attention(36, 40, 8, 128, chunk_tokens=8192) + attention(12, 40, 8, 128))
    assert printed(cache_of(scout, "vllm@0.8.3", context_tokens=2**20, tp=8), 9.97)["needed"] == "24.00"


def test_page_of_a_state_is_rounded_to_the_kernel() -> None:
    """788 kB of state over 2 kB a token: 394 tokens, 512 in multiples of 256 (vllm#25752)."""
    state = LayerSpec(state=(StateTensor("ssm", 197_000, "float32"),))
    cache = cache_of(model((*attention(1, 1, 1, 500), state)), "vllm", kernel_tokens=256)
    assert printed(cache)["block_tokens"] == "512"
