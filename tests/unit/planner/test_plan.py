"""The plan itself: verdicts, additive terms, JSON, times, comparisons and advice."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from kvarn.core.errors import IncompatiblePlan, InvalidRequest, UnknownName
from kvarn.core.formats import format_names
from kvarn.core.geometry import ParameterCount, geometry_from_factors
from kvarn.planner.advise import advise, prices
from kvarn.planner.api import ask, plan
from kvarn.planner.compute import make_plan
from kvarn.planner.engines import load_engine
from kvarn.planner.explain import explain
from kvarn.planner.machines import find_device
from kvarn.planner.report import compare, render
from kvarn.planner.result import EXIT_CODES, Plan
from kvarn.planner.roofline import decode_work, limit, prefill_work, seen_tokens, weights_seen
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import GIB
from support.planning import GEMMA_31B, H100, LLAMA_2_7B, LLAMA_3_8B, QWEN_27B, case_of, latent, model


def test_verdicts_and_exit_codes() -> None:
    fits, not_, open_ = plan(LLAMA_3_8B, H100), plan(LLAMA_3_8B, H100, context="128k", concurrency=32), plan(LLAMA_3_8B)
    assert [p.verdict for p in (fits, not_, open_)] == ["fits", "does_not_fit", "unknown"]
    assert [p.exit_code for p in (fits, not_, open_)] == [0, 1, 2] == list(EXIT_CODES.values())
    assert "no hardware" in open_.reason


def test_too_close_to_tell_is_said() -> None:
    budget = plan(LLAMA_3_8B, H100, engine="vllm")
    assert budget.cache_low is not None
    assert budget.cache_high is not None
    tokens = (budget.cache_low + budget.cache_high) // 2 // budget.kv.bytes_per_token // 16 * 16
    found = plan(LLAMA_3_8B, H100, engine="vllm", context=tokens)
    assert found.verdict == "unknown"
    assert "too close to tell" in found.reason


def test_unknown_weights_leave_the_verdict_open() -> None:
    factors = geometry_from_factors(32, 8, 128)
    assert plan(factors, "custom:24GiB").verdict == "unknown"
    assert plan(factors, kv_memory="4GiB").verdict == "fits"
    assert plan(factors, kv_memory="1MiB").verdict == "does_not_fit"


def test_asked_cache_and_weights_must_fit_the_device() -> None:
    found = plan(LLAMA_3_8B, "custom:24GiB", kv_memory="20GiB")
    assert found.verdict == "does_not_fit"
    assert "more than the device has" in found.reason


def test_terms_add_up_to_the_device() -> None:
    found = plan(LLAMA_3_8B, H100, concurrency=8, engine="vllm")
    assert found.device is not None
    assert sum(t.bytes for t in found.terms) + found.device.free_bytes == found.device.memory_bytes == H100.memory_bytes
    assert [t.certainty for t in found.terms if t.name.startswith(("weights", "KV"))] == ["exact"] * 3


def test_a_plan_is_frozen_and_comes_back_from_json() -> None:
    found = plan(QWEN_27B, H100, tp=2, engine="vllm@0.21", concurrency=4)
    with pytest.raises(FrozenInstanceError):
        found.verdict = "fits"  # type: ignore[misc]
    assert Plan.from_json(found.to_json()) == found
    data = json.loads(found.to_json())
    assert {"verdict", "kv", "weights", "capacity", "time", "terms", "provenance"} <= set(data)
    kv_names = {"bytes_per_token", "bytes_per_sequence", "bytes_total", "k_bytes", "v_bytes", "state_bytes"}
    assert kv_names <= set(data["kv"])
    assert kv_names <= set(data["kv"]["rank"])
    assert {"bytes", "parameters"} <= set(data["weights"])
    assert {"blocks", "tokens", "max_context", "concurrency"} <= set(data["capacity"])
    assert {"prefill_s", "decode_s_per_token", "bound_by"} <= set(data["time"])
    assert all({"name", "bytes", "certainty"} <= set(t) for t in data["terms"])
    assert all(isinstance(t["bytes"], int) for t in data["terms"])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"verdict": 3, "nonsense": 1}', '"plan"'])
def test_json_that_is_no_plan(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Plan.from_json(text)


def test_pipeline_stages_have_their_own_weights() -> None:
    found = plan(replace(LLAMA_3_8B, layers=LLAMA_3_8B.layers), H100, pp=2)
    assert found.weights.rank_bytes < found.weights.bytes
    assert found.kv.rank.bytes_per_token * 2 == found.kv.bytes_per_token


def test_devices_are_spread_by_tensor_parallel() -> None:
    assert plan(LLAMA_3_8B, devices=4).tp == 4
    assert plan(LLAMA_3_8B, devices=4, pp=2).tp == 2
    with pytest.raises(InvalidRequest, match="3 devices"):
        plan(LLAMA_3_8B, devices=3, pp=2)


def test_batch_and_concurrency_stand_in_for_each_other() -> None:
    assert (plan(LLAMA_3_8B, batch=4).sequences, plan(LLAMA_3_8B, concurrency=4).batch) == (4, 4)
    both = plan(LLAMA_3_8B, batch=4, concurrency=8)
    assert (both.batch, both.sequences) == (4, 8)


@pytest.mark.parametrize(
    "figures",
    [{"context": 0}, {"batch": 0}, {"concurrency": -1}, {"tp": 0}, {"devices": -2}, {"block_size": 0}, {"pp": 99}],
)
def test_figures_that_mean_nothing(figures: dict[str, int]) -> None:
    with pytest.raises((InvalidRequest, IncompatiblePlan)):
        plan(LLAMA_3_8B, **figures)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", ["int7", "k=int8", "k=int8,v=fp99"])
def test_unknown_formats(kv: str) -> None:
    with pytest.raises((UnknownName, IncompatiblePlan)):
        plan(LLAMA_3_8B, kv=kv)
    with pytest.raises((UnknownName, IncompatiblePlan)):
        plan(LLAMA_3_8B, kv=kv, engine="vllm")


@pytest.mark.parametrize(
    "text", ["custom:", "custom:24G", "custom:24GiB:fast", "custom:1GiB:1GB:xFLOPS", "custom:1GiB:1GB:1T:9"]
)
def test_bad_custom_devices(text: str) -> None:
    with pytest.raises(InvalidRequest):
        find_device(text)


def test_roofline_of_a_known_case() -> None:
    """Llama-3-8B, batch 1, no context: 16 GB of weights over 3.35 TB/s; 8,192 tokens of prefill over 989 TFLOP/s."""
    settings, params = Settings(context_tokens=8192), LLAMA_3_8B.parameters
    assert params is not None
    decode = decode_work(LLAMA_3_8B, settings, 1, 1, 2.0, 0.0)
    first = prefill_work(LLAMA_3_8B, settings, 8192, 2.0)
    assert decode.weight_bytes == 2 * (params.total + 128256 * 4096)
    step, prompt = (limit(w, H100, settings, "bf16") for w in (decode, first))
    assert step is not None
    assert prompt is not None
    assert step.bound_by == "memory"
    assert step.seconds == pytest.approx(decode.weight_bytes / 3.35e12)
    assert prompt.bound_by == "compute"
    attention = 32 * 2 * 32 * 256 * (8192 * 8193 // 2)
    assert first.flops == pytest.approx(2 * params.total * 8192 + attention + 2 * 128256 * 4096)


def test_windows_are_seen_only_so_far() -> None:
    spec = GEMMA_31B.layers[0]
    assert seen_tokens(spec, 0, 1024) == 1024 * 1025 // 2
    assert seen_tokens(spec, 5000, 1) == 1024
    assert seen_tokens(spec, 0, 2000) == sum(min(i + 1, 1024) for i in range(2000))
    assert seen_tokens(spec, 1000, 100) == sum(min(i + 1, 1024) for i in range(1000, 1100))


def test_experts_are_read_as_they_are_touched() -> None:
    moe = model(LLAMA_3_8B.layers, experts=128, experts_active=8, vocab_size=0)
    moe = replace(moe, parameters=ParameterCount(0, 1, 100, experts=1280, active_experts=80))
    assert weights_seen(moe, 1) == (180.0, 101 + 1280 * 8 / 128)
    assert 101 + 1279 < weights_seen(moe, 500)[1] <= 101 + 1280


def test_tokens_per_second_rise_with_batch_and_say_what_binds() -> None:
    points = plan(LLAMA_3_8B, H100, context=1024).time.batches
    rates = [p.tokens_per_s for p in points]
    assert rates == sorted(rates)
    assert points[0].bound_by == "memory"
    assert points[0].fits
    assert not plan(LLAMA_3_8B, H100, context="128k").time.batches[-1].fits


def test_without_speeds_there_are_no_times() -> None:
    found = plan(LLAMA_3_8B, "custom:80GB")
    assert found.time.prefill_s is None
    assert found.time.prefill_flops
    assert "Speed" not in render(found)


def test_report_says_the_verdict_first_and_the_sum_last() -> None:
    text = render(plan(LLAMA_3_8B, H100, engine="vllm", concurrency=2))
    assert text.startswith("FITS: 2 x 8,192 (8k) tokens need 2.00 GiB = 2.15 GB of cache")
    assert "80,000,000,000 B" in text
    assert "GPU KV cache size:" in text
    assert "bound by memory" in text


def test_explain_puts_every_factor_in() -> None:
    case = case_of(LLAMA_3_8B, "kvarn", context="128k")
    text = explain(case, make_plan(case, H100))
    assert "2 x 32 layers x 8 KV heads x 128 dim x 2 B = 131,072 B a token" in text
    assert "17,179,869,184 B = 16.00 GiB = 17.18 GB" in text
    for name in ("MHA, 32 KV heads", "GQA, 8 KV heads", "MQA, 1 KV head", "MLA, latent 512", "without"):
        assert name in text


def test_explain_every_kind_and_format() -> None:
    mixed = model((*GEMMA_31B.layers, *QWEN_27B.layers, replace(LLAMA_3_8B.layers[0], shares_layer=0)), 10**9)
    for kv in format_names():
        case = case_of(mixed, "kvarn", kv=kv)
        assert "state:" in explain(case, make_plan(case, None))
    case = case_of(model(latent(4), 10**9), "vllm", kv="fp8_ds_mla")
    assert "512/128 x 4 B scales" in explain(case, make_plan(case, None))


def test_comparison_has_a_column_each() -> None:
    text = compare([plan(LLAMA_2_7B), plan(LLAMA_3_8B)])
    assert "524,288 B" in text
    assert "131,072 B" in text


def test_advice_is_ranked_and_priced() -> None:
    profile, version = load_engine("kvarn")
    asked = ask(LLAMA_3_8B, profile, version, context="128k", concurrency=8)
    case = case_of(LLAMA_3_8B, "kvarn", context="128k", concurrency=8)
    before = make_plan(case, H100)
    assert before.verdict == "does_not_fit"
    found = advise(case, asked, H100, before)
    verdicts = [a.verdict for a in found]
    assert verdicts[0] == "fits"
    assert verdicts == sorted(verdicts, key=lambda v: v != "fits")
    assert {"setting", "policy", "model"} == {a.kind for a in found}
    assert all(a.saved_bytes > 0 or (a.concurrency or 0) > 1 or (a.context or 0) > 1 for a in found)
    assert all(a.price for a in found)
    by_change = {a.change: a for a in found}
    assert by_change["--kv int8"].saved_bytes > 0
    assert "a model with MQA with 1 KV head" in by_change


def test_every_format_has_a_price() -> None:
    assert {f"kv.{n}" for n in format_names()} <= set(prices())


def test_budget_rules() -> None:
    whole = plan(LLAMA_3_8B, H100, engine="vllm", flags=["--gpu-memory-utilization", "0.5"])
    assert (whole.cache_bytes or 0) < 40 * 10**9 - 16 * 10**9
    assert plan(LLAMA_3_8B, H100, engine="vllm", kv_memory=GIB).cache_bytes == GIB
