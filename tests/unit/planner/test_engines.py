"""The other engines' storage and reporting rules, on publicly reported figures."""

from __future__ import annotations

import pytest

from kvarn.core.errors import InvalidRequest, UnknownName
from kvarn.core.registry import names_in
from kvarn.planner.engines import PACKAGE, engine_names, flag_fields, load_engine
from kvarn.planner.profiles.kvarn import KvarnCache
from kvarn.planner.sizes import GIB, MIB
from support.planning import LLAMA_3_8B, QWEN_27B, attention, cache_of, case_of, latent, model, printed

LLAMA_32_3B = model(attention(28, 24, 8, 128))
MUSE = model(attention(39, 16, 2, 128, window_tokens=2048) + attention(13, 16, 2, 128))


@pytest.mark.parametrize(
    ("k", "mib"), [("f16", "224.00"), ("q8_0", "119.00"), ("q5_1", "84.00"), ("q4_1", "70.00"), ("q4_0", "63.00")]
)
def test_llama_cpp_formats_count_their_scales(k: str, mib: str) -> None:
    cache = cache_of(LLAMA_32_3B, "llama.cpp", kv_k=k, kv_v="f16")
    assert (printed(cache)["k"], printed(cache)["v"]) == (mib, "224.00")


def test_llama_cpp_windows_keep_window_and_micro_batch() -> None:
    found = printed(cache_of(MUSE, "llama.cpp", context_tokens=32768))
    assert (found["full"], found["window"], found["window_cells"]) == ("416.00", "97.50", "2560")
    wide = printed(cache_of(MUSE, "llama.cpp", context_tokens=131072, batched_tokens=2048))
    assert (wide["full"], wide["window"]) == ("1664.00", "156.00")


def test_llama_cpp_swa_full_keeps_everything() -> None:
    gpt_oss = model(attention(18, 64, 8, 64, window_tokens=128) + attention(18, 64, 8, 64))
    found = printed(cache_of(gpt_oss, "llama.cpp", window_full=True))
    assert (found["kv"], found["full"], found["window"]) == ("288.00", "144.00", "144.00")


@pytest.mark.parametrize(("slots", "mib"), [(3, "27.00"), (4, "18.00")])
def test_llama_cpp_pads_every_slot(slots: int, mib: str) -> None:
    """-c 1024 over 3 slots is 1536 cells, over 4 it is 1024."""
    gemma = model(attention(15, 4, 1, 256, window_tokens=512) + attention(3, 4, 1, 256))
    profile, _ = load_engine("llama.cpp")
    fields = flag_fields(profile, ["-c", "1024", "-np", str(slots)])
    assert printed(case_of(gemma, "llama.cpp", fields=fields).stages[0])["kv"] == mib


def test_llama_cpp_window_for_every_layer_is_ignored() -> None:
    phi3 = model(attention(32, 32, 32, 96, window_tokens=2047))
    assert printed(cache_of(phi3, "llama.cpp"))["kv"] == "1536.00"


def test_llama_cpp_state_is_float32_by_slots_and_drafts() -> None:
    assert printed(cache_of(QWEN_27B, "llama.cpp", context_tokens=8192))["state"] == "149.62"
    drafted = printed(cache_of(QWEN_27B, "llama.cpp", context_tokens=262144, draft_tokens=6, draft_layers=1))
    assert (drafted["state"], drafted["draft"], drafted["kv"]) == ("1047.38", "1024.00", "16384.00")


def test_llama_cpp_mla_before_and_after() -> None:
    r1 = model(latent(61))
    old = printed(cache_of(r1, "llama.cpp@2025-02"))
    assert (old["kv"], old["k"], old["v"]) == ("19520.00", "11712.00", "7808.00")
    new = cache_of(r1, "llama.cpp", context_tokens=131072, kv_k="q8_0", kv_v="q8_0")
    assert printed(new)["kv"] == "4666.50"
    assert "v" not in printed(new)


def test_sglang_says_gb_and_means_gib() -> None:
    qwen = model(attention(94, 64, 4, 128))
    cache = cache_of(qwen, "sglang", tp=4)
    found = {f.name: f.text for f in cache.figures_at(367_404)}
    assert (found["k"], found["v"]) == ("8.23", "8.23")


def test_sglang_state_pool_has_a_row_more() -> None:
    cache = cache_of(QWEN_27B, "sglang", slots=124)
    found = {f.name: f.text for f in cache.figures_at(330_323)}
    assert (found["k"], found["conv_state"], found["ssm_state"]) == ("10.08", "0.34", "17.58")


def test_sglang_left_the_indexer_out_of_its_log() -> None:
    v32 = model(latent(61, index_dim=128))
    old, new = (
        {f.name: f.text for f in cache_of(v32, f"sglang@{v}", kv_k="fp8_ds_mla", block_size=64).figures_at(1_462_784)}
        for v in ("before #11309", "2026-01")
    )
    assert (old["kv"], new["kv"]) == ("54.52", "65.49")


def test_tensorrt_llm_counts_blocks() -> None:
    cache = cache_of(model(latent(61)), "tensorrt-llm", kv_k="fp8")
    found = {f.name: f.text for f in cache.figures_at(5_073_376)}
    assert (found["blocks"], found["kv"]) == ("158543", "166.02")
    assert cache_of(LLAMA_3_8B, "tensorrt-llm@0.8").blocks(GIB) == GIB // (131_072 * 64)


def test_tensorrt_llm_takes_a_share_of_what_is_free() -> None:
    """Not of the total (TensorRT-LLM#1400)."""
    profile, _ = load_engine("trtllm")
    assert (profile.budget, profile.fraction) == ("free", 0.9)


def test_ollama_context_is_the_total_over_slots() -> None:
    gemma = model(attention(52, 32, 16, 128, window_tokens=1024) + attention(10, 32, 16, 128))
    profile, _ = load_engine("ollama")
    fields = flag_fields(profile, ["OLLAMA_CONTEXT_LENGTH=8192", "OLLAMA_NUM_PARALLEL=2"])
    cache = case_of(gemma, "ollama", fields=fields).stages[0]
    assert cache.lines(0)[0] == 'memory.required.kv="1.6 GiB"'
    assert printed(cache_of(model(attention(40, 40, 10, 128)), "ollama", context_tokens=2048))["required_kv"] == "400.0"


def test_mlc_figure_includes_its_workspace() -> None:
    cache = cache_of(LLAMA_3_8B, "mlc@2024-05", sequences=48)
    assert {f.name: f.text for f in cache.figures_at(126_754)}["kv"] == "16054.47"
    assert cache.tokens(int(16054.47 * MIB)) == 126_754


def test_kvarn_plans_what_its_engine_allocates() -> None:
    cache = cache_of(MUSE, "kvarn", context_tokens=8192, kv_memory_bytes=GIB)
    assert isinstance(cache, KvarnCache)
    found = cache.cache_plan(GIB)
    assert found is not None
    assert found.nbytes <= GIB
    assert printed(cache, 1.0)["pools"] == f"{found.nbytes / MIB:.2f}"
    assert cache.cache_plan(1) is None


def test_every_profile_is_found_and_takes_its_flags() -> None:
    assert len(engine_names()) == len(names_in(PACKAGE)) == 7
    for name in engine_names():
        profile, _ = load_engine(name)
        assert profile.name == name
        flags = [n for f in profile.flags for n in f.names]
        assert len(flags) == len(set(flags))


def test_flags_in_the_engines_own_spelling() -> None:
    profile, version = load_engine("vllm@0.20.1")
    assert version.numbers == (0, 20, 1)
    found = flag_fields(profile, ["--max-model-len=32k", "--gpu-memory-utilization", "0.95", "--enforce-eager"])
    assert found == {"context_tokens": 32768, "memory_fraction": 0.95, "graphs": False}


@pytest.mark.parametrize(
    "arguments", [["--max-model-len"], ["--max-model-len", "long"], ["--tp", "x"], ["--swap-space", "y"]]
)
def test_bad_flags(arguments: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        flag_fields(load_engine("vllm")[0], arguments)


def test_unknown_engine_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="vllm"):
        load_engine("vlm")


@pytest.mark.parametrize(
    ("kv", "rate"), [("q8_0", 69_632), ("q4_0", 36_864), ("nvfp4", 36_864), ("int8_per_token_head", 67_584)]
)
def test_peers_formats_in_kvarns_blocks(kv: str, rate: int) -> None:
    """Formats that Kvarn's engine does not hold are planned for comparison, and that is said."""
    cache = cache_of(LLAMA_3_8B, "kvarn", kv_k=kv, kv_v=kv)
    assert cache.growth().total == rate
    assert cache.held(1, 33).total == 64 * rate
    assert "does not hold" in cache.notes()[0]


def test_kivi_is_kvarns_two_bit_format() -> None:
    kivi, own = (cache_of(LLAMA_3_8B, "kvarn", kv_k=kv, kv_v=kv) for kv in ("kivi", "int2"))
    assert kivi.held(1, 4096) == own.held(1, 4096)
    assert isinstance(kivi, KvarnCache)
