"""The catalogue: complete, sourced, consistent with transformers' classes, and found by the names people use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvarn.core.geometry import geometry_of
from kvarn.core.geometry.build import class_defaults
from kvarn.core.specs import LayerKind
from kvarn.planner.catalogue import (
    DeviceEntry,
    ModelEntry,
    device_entries,
    find_device_entry,
    find_model,
    load_model,
    model_entries,
    normalise,
)
from kvarn.planner.sources import load_geometry

CORPUS = Path(__file__).parents[2] / "data" / "kv_ground_truth.jsonl"
# How the records' authors write a model -> its catalogue name, where the spelling alone does not say it.
WRITTEN = {
    "Llama-3-70B-FP8": "llama-3-70b",
    "nvidia/cosmos-reason2-2b (Qwen3-VL-2B base)": "qwen3-vl-2b",
    "google/gemma-4-31B-it": "gemma-4-31b",
    "cyankiwi/gemma-4-31B-it-AWQ-4bit": "gemma-4-31b",
    "qwen3.6-35b-a3b-nvfp4": "qwen3.6-35b-a3b",
    "qwen35 27B": "qwen3.5-27b",
    "qwen3.6 35B-A3B": "qwen3.6-35b-a3b",
    "Qwen3.6-27B Q4_K_M": "qwen3.6-27b",
    "ornith:9b (qwen35)": "qwen3.5-9b",
    "qwen3moe": "qwen3-30b-a3b",
    "Gemma-1.1-2B": "gemma-2b",
    "Qwen3-VL-32B-Thinking-FP8": "qwen3-vl-32b",
    "Qwen3.8-27B-FP8": "qwen3.8-27b",
    "Qwen/Qwen3.8-27B-FP8": "qwen3.8-27b",
    "Qwythos-27B (qwen35) with MTP n_max 6": "qwen3.8-27b",
    "Qwen3-Next-80B-A3B W4A16": "qwen3-next-80b-a3b",
    "DeepSeek-V3 arch (compressed-tensors weights)": "deepseek-v3",
}
PLAIN_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "fp8": 1.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
# Published sizes, in billions of parameters, as the models' pages state them.
PUBLISHED = {
    "llama-2-7b": 6.74,
    "llama-3-8b": 8.03,
    "llama-3.1-405b": 405.9,
    "llama-4-scout": 107.8,
    "qwen2.5-7b": 7.62,
    "qwen3-30b-a3b": 30.5,
    "mixtral-8x7b": 46.7,
    "gemma-2-27b": 27.2,
    "gemma-4-31b": 30.7,
    "phi-3-medium": 13.96,
    "deepseek-v2": 235.7,
    "deepseek-v3": 671.0,
    "kimi-k2": 1026.0,
    "gpt-oss-120b": 116.8,
    "command-r-plus": 103.8,
    "granite-4.0-h-tiny": 6.94,
    "jamba-1.5-large": 398.6,
    "falcon-180b": 178.6,
    "minimax-text-01": 456.1,
    "lfm2-1.2b": 1.17,
}


@pytest.mark.parametrize("entry", model_entries(), ids=lambda e: e.name)
def test_every_model_has_a_geometry_and_a_source(entry: ModelEntry) -> None:
    found = geometry_of(entry.config)
    assert found.layers
    assert found.unknown_keys == ()
    assert found.parameters is not None
    assert found.parameters.active <= found.parameters.total
    assert found.max_context is not None or found.layers[0].kind is LayerKind.STATE
    assert entry.source
    assert entry.hub.count("/") == 1


def test_the_catalogue_is_as_large_as_promised() -> None:
    assert len(model_entries()) >= 80
    assert len(device_entries()) >= 40
    families = "llama-7b llama-2-7b llama-3-8b llama-4-scout qwen1.5-7b qwen2.5-7b qwen3-8b qwen3.5-9b mistral-7b-v0.1 "
    families += (
        "mixtral-8x7b gemma-2b gemma-2-9b gemma-3-27b gemma-4-31b phi-4 deepseek-v3 kimi-k2 glm-4.5 gpt-oss-20b "
    )
    families += "falcon-7b starcoder opt-13b gpt2 gpt-neox-20b command-r granite-3.1-8b minicpm3-4b nemotron-h-56b "
    families += "jamba-v0.1 smollm2-135m"
    assert [name for name in families.split() if find_model(name) is None] == []


def test_no_two_models_share_a_spelling() -> None:
    owners: dict[str, set[str]] = {}
    for entry in model_entries():
        for name in (entry.name, entry.hub, *entry.also):
            owners.setdefault(normalise(name), set()).add(entry.name)
    assert {name: who for name, who in owners.items() if len(who) > 1} == {}


@pytest.mark.parametrize(
    "spelling",
    [
        "llama-3.1-8b",
        "Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "llama3.1:8b",
        "LLAMA_3.1_8B",
        " llama 3.1 8b ",
    ],
)
def test_spellings_of_one_model(spelling: str) -> None:
    found = find_model(spelling)
    assert found is not None
    assert found.name == "llama-3.1-8b"


def test_versions_are_not_confused() -> None:
    names = (
        "llama-3-8b",
        "llama-3.1-8b",
        "mistral-7b-v0.1",
        "mistral-7b-v0.3",
        "qwen2-7b",
        "qwen2.5-7b",
        "phi-3.5-mini",
    )
    assert [load_model(n).name for n in names] == list(names)
    assert find_model("llama-3.18b") is None or find_model("llama-3.18b") == find_model("llama-3.1-8b")
    assert find_model("") is None
    assert find_model("llama-5-8b") is None


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_counted_parameters_agree_with_the_published_size(name: str, billions: float) -> None:
    counted = load_geometry(name).parameters
    assert counted is not None
    assert counted.total / 1e9 == pytest.approx(billions, rel=0.005)


def test_what_comes_from_a_config_class_agrees_with_it() -> None:
    compared = 0
    for entry in model_entries():
        if not entry.source.startswith("default values"):
            continue
        defaults = class_defaults()[entry.config["model_type"]]
        for key, value in entry.config.items():
            if defaults.get(key, "auto") not in ("auto", -1) and key not in ("max_position_embeddings", "layer_types"):
                assert value == defaults[key], (entry.name, key)
                compared += 1
    assert compared > 100


def _per_token(name: str, tp: int) -> set[int]:
    """Elements a token and rank: of all layers, of those that see everything, and with the draft layers."""
    found = load_geometry(name)

    def rank(layers: tuple) -> int:
        shared = [s for s in layers if s.kind is not LayerKind.SHARED]
        heads = sum(max(1, s.kv_heads // tp) * (s.k_dim + s.v_dim) for s in shared if s.kv_heads)
        return heads + sum(s.latent_dim + s.rope_dim + s.index_dim for s in shared)

    full = tuple(s for s in found.layers if s.window_tokens is None and s.chunk_tokens is None)
    return {rank(found.layers), rank(full), rank((*found.layers, *found.drafts))}


def test_publicly_reported_bytes_per_token_follow_from_the_catalogue() -> None:
    """Records whose config is known apart from their log, in formats that need no engine's rule (those are tested with
    the engines). One engine charges a draft layer that the model's config does not state."""
    judged, missed = 0, []
    for line in CORPUS.read_text("utf-8").splitlines():
        record = json.loads(line)
        bytes_each = PLAIN_BYTES.get(record["kv_dtype"])
        if record["independent_check"] != "yes" or not record["expected_bytes_per_token"] or bytes_each is None:
            continue
        entry = find_model(WRITTEN.get(record["model"], record["model"]))
        if record["id"] == "lcpp-r1-mha" or entry is None:
            continue  # an engine that expanded the latent; models outside the catalogue
        judged += 1
        found = {round(n * bytes_each) for n in _per_token(entry.name, record["tp"] or 1)}
        if round(record["expected_bytes_per_token"]) not in found:
            missed.append(record["id"])
    assert judged >= 50
    assert missed == ["vllm-cosmos-reason2"]


@pytest.mark.parametrize("entry", device_entries(), ids=lambda e: e.name)
def test_every_device_is_plausible_and_sourced(entry: DeviceEntry) -> None:
    """Dense figures: fp8 is twice bf16 at most (sparse ones would be four times), and nothing is off by a thousand."""
    assert 4 << 30 <= entry.memory_bytes <= 8 << 40
    assert entry.bandwidth_bytes_per_s is None or 10e9 <= entry.bandwidth_bytes_per_s <= 30e12
    assert entry.source.startswith(("http", "memory as", "aiconfigurator", "https"))
    assert all(50e9 <= value <= 3e16 for value in entry.flops.values())
    wide = entry.flops.get("bf16") or entry.flops.get("f16")
    if wide and "fp8" in entry.flops:
        assert 0.95 <= entry.flops["fp8"] / wide <= 2.05
    if "fp4" in entry.flops and "fp8" in entry.flops:
        assert 1.9 <= entry.flops["fp4"] / entry.flops["fp8"] <= 4.05
    assert set(entry.flops) <= {"fp4", "fp8", "int8", "bf16", "f16", "tf32", "f32"}


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100", "h100-sxm"),
        ("NVIDIA H100", "h100-sxm"),
        ("A100 80GB", "a100-sxm-80gb"),
        ("rtx4090", "rtx-4090"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Google TPU v5e", "tpu-v5e"),
        ("Xeon Platinum 8480+", "xeon-8480+"),
        ("m2 ultra", "m2-ultra-192gb"),
    ],
)
def test_devices_by_the_names_people_use(spelling: str, name: str) -> None:
    found = find_device_entry(spelling)
    assert found is not None
    assert found.name == name
