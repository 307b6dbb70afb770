"""Logs: what an engine prints is read back, and compared figure by figure."""

from __future__ import annotations

import pytest

from kvarn.planner.logs import compare_log, log_report, parse_log, read_figure, settings_from_log
from kvarn.planner.sizes import GIB, MIB
from support.planning import GEMMA_31B, LLAMA_3_8B, QWEN_27B, case_of, latent, model

ROOM = int(24.54 * GIB)
MODELS = {"dense": LLAMA_3_8B, "windows": GEMMA_31B, "states": QWEN_27B, "latents": model(latent(61), 10**9)}
ENGINES = ("vllm@0.8", "vllm@0.20", "vllm@0.24", "sglang", "llama.cpp", "tensorrt-llm", "ollama", "mlc")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_printed_lines_are_read_back_and_agree(engine: str, name: str) -> None:
    """The planner's own emulated log, read by the planner's own reader: every figure that both know agrees."""
    if engine == "vllm@0.8" and name != "dense":
        pytest.skip("vLLM's first engine has one kind of layer")
    case = case_of(MODELS[name], engine, context=20000)
    lines = case.stages[0].lines(ROOM)
    logged = parse_log("\n".join((*lines, "Available KV cache memory: 24.54 GiB")))
    assert logged
    found = compare_log(case, logged)
    judged = [c for c in found if c.agrees is not None]
    assert judged
    assert all(c.agrees for c in judged), [c for c in judged if not c.agrees]
    assert f"{len(judged)} of {len(judged)} figures agree" in log_report(found, case)[0]


def test_a_real_error_line_of_vllm() -> None:
    text = (
        "ValueError: To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (2.4 GiB). Based on the available memory, the "
        "estimated maximum model length is 17472. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`"
    )
    logged = parse_log(text)
    assert logged["needed"].value == 5.62 * GIB
    assert logged["available"].half_step == pytest.approx(0.05 * GIB)
    qwen3_8b = model((LLAMA_3_8B.layers[0],) * 36, 8 * 10**9)
    case = case_of(qwen3_8b, "vllm@0.10", context=8192)
    assert settings_from_log(case.settings, logged).context_tokens == 40960
    found = {c.name: c.agrees for c in compare_log(case_of(qwen3_8b, "vllm@0.10", context=40960), logged)}
    assert found["estimated_length"]


def test_a_real_log_of_llama_cpp_with_windows() -> None:
    text = "\n".join(
        (
            "llama_kv_cache: size =  416.00 MiB ( 32768 cells,  13 layers,  1/1 seqs), K (f16):  208.00 MiB, "
            "V (f16):  208.00 MiB",
            "llama_kv_cache: size =   97.50 MiB (  2560 cells,  39 layers,  1/1 seqs), K (f16):   48.75 MiB, "
            "V (f16):   48.75 MiB",
            "llama_memory_recurrent: size =  149.62 MiB (     1 cells,  64 layers,  1 seqs), R (f32):    5.62 MiB, "
            "S (f32):  144.00 MiB",
        )
    )
    logged = parse_log(text)
    assert logged["kv"].value == pytest.approx(513.5 * MIB)
    assert (logged["full"].text, logged["window"].text) == ("416.00 MiB", "97.50 MiB")
    assert (logged["cells"].value, logged["window_cells"].value) == (32768, 2560)
    assert logged["ssm_state"].value == 144 * MIB


def test_a_log_with_a_wrong_figure_differs() -> None:
    case = case_of(LLAMA_3_8B, "vllm@0.19", context=20000)
    logged = parse_log("Available KV cache memory: 24.54 GiB\nGPU KV cache size: 402,128 tokens")
    assert [c.agrees for c in compare_log(case, logged)] == [False]


@pytest.mark.parametrize(
    ("digits", "unit", "value", "half"),
    [("38.6", "GiB", 38.6 * GIB, 0.05 * GIB), ("1,952", None, 1952, 0.0), ("1.56", None, 1.56, 0.005)],
)
def test_a_figure_knows_its_last_digit(digits: str, unit: str | None, value: float, half: float) -> None:
    found = read_figure("x", digits, unit)
    assert (found.value, found.half_step) == pytest.approx((value, half))
