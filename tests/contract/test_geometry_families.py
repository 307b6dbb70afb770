"""Every architecture's geometry against transformers' own modules, built without memory: parameters to the last one,
and the heads of every key projection. What transformers cannot build says why it is not compared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvarn.core.geometry import ModelGeometry, geometry_of  # noqa: E402
from kvarn.core.geometry.build import _families, class_defaults  # noqa: E402

QUICK = {"llama", "qwen2", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3", "falcon_h1", "qwen3_5_text", "lfm2"}
# Values that make a class buildable whose defaults are not.
NEEDED: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "nemotron": {"num_key_value_heads": 8},
    "glm4_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "num_hidden_layers": 4},
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
}
# Further settings of an architecture that change what is stored or counted.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 10}),
    ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}),
    ("stablelm", {"use_parallel_residual": True}),
    ("cohere", {"use_qk_norm": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64, "hidden_size": 4096}),
    (
        "falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "hidden_size": 2048, "num_attention_heads": 32},
    ),
    (
        "opt",
        {"word_embed_proj_dim": 512, "hidden_size": 1024, "do_layer_norm_before": False, "num_attention_heads": 16},
    ),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True, "num_hidden_layers": 6}),
    ("glm_moe_dsa", {"index_topk_freq": 4}),
    ("llama4_text", {"interleave_moe_layer_step": 2, "num_local_experts": 32}),
    ("phimoe", {"lm_head_bias": True, "attention_bias": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("glm4_moe", {"use_qk_norm": True, "head_dim": 128}),
    ("granitemoehybrid", {"num_local_experts": 0, "num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2}),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "moe_latent_size": 1024}),
    ("zamba2", {"use_shared_attention_adapter": True, "num_mem_blocks": 2}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_d_ssm": None}),
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0}),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704}),
    ("gemma4_text", {"num_kv_shared_layers": 12, "use_double_wide_mlp": True}),
    ("minimax", {"layer_types": ["linear_attention"] * 7 + ["full_attention"], "num_hidden_layers": 8}),
    ("mamba", {"use_bias": True, "tie_word_embeddings": False}),
    (
        "minimax_m3_vl_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"] * 2,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        },
    ),
    ("exaone4", {"num_hidden_layers": 30}),
]
# transformers builds weights here that the published model does not have.
NOT_COMPARED = {"longcat_flash": "transformers allots weights to the experts that do nothing (zero_expert_num)"}


def cases() -> Iterator[Any]:
    for model_type in sorted(_families()):
        slow = () if model_type in QUICK else (pytest.mark.slow,)
        yield pytest.param(model_type, NEEDED.get(model_type, {}), id=model_type, marks=slow)
    for model_type, values in VARIANTS:
        yield pytest.param(model_type, values, id=f"{model_type}-{'-'.join(values)}", marks=pytest.mark.slow)


def build(model_type: str, values: dict[str, Any]) -> tuple[Any, Any, int]:
    """transformers' config, its modules on the meta device, and their parameters. Skips what it cannot build. Language
    models of multimodal classes have no head of their own there; it is added as tie_word_embeddings says."""
    if model_type in NOT_COMPARED:
        pytest.skip(NOT_COMPARED[model_type])
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no config class {model_type} (remote code)")
    config = transformers.CONFIG_MAPPING[model_type](**values)
    has_head = type(config) in transformers.AutoModelForCausalLM._model_mapping
    builder = transformers.AutoModelForCausalLM if has_head else transformers.AutoModel
    try:
        with torch.device("meta"):
            model = builder.from_config(config)
    except (TypeError, ValueError, AttributeError) as error:
        pytest.skip(f"transformers cannot build {model_type} from its defaults: {error}")
    total = sum(p.numel() for p in model.parameters())
    if not has_head and not getattr(config, "tie_word_embeddings", False):
        total += config.vocab_size * config.hidden_size
    return config, model, total


def count(geometry: ModelGeometry) -> int:
    assert geometry.parameters is not None
    return geometry.parameters.total


@pytest.mark.parametrize(("model_type", "values"), cases())
def test_parameters_and_key_heads(model_type: str, values: dict[str, Any]) -> None:
    config, model, expected = build(model_type, values)
    saved = geometry_of(config.to_dict())
    assert count(saved) == expected
    assert saved.unknown_keys == (), "a config as transformers saves it is understood in full"
    sparse = {"model_type": model_type, **values}
    if model_type != "nemotron_h" or values:  # its class invents four layers where none are stated; Kvarn refuses
        assert count(geometry_of(sparse)) == expected, "class defaults fill what a file leaves out"
    _compare_key_projections(model, saved)
    _compare_windows(config, saved)


def _compare_key_projections(model: Any, geometry: ModelGeometry) -> None:
    """A projection named k_proj of layer i has kv_heads * k_dim rows."""
    for name, weight in model.named_parameters():
        found = re.search(r"(?:^|\.)layers\.(\d+)\.(?:self_attn|mixer)\.k_proj\.weight$", name)
        spec = geometry.layers[int(found[1])] if found else None
        if spec is not None and spec.kv_heads:
            assert weight.shape[0] == spec.kv_heads * spec.k_dim, name


def _compare_windows(config: Any, geometry: ModelGeometry) -> None:
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" in kinds and len(kinds) == len(geometry.layers):
        assert [s.window_tokens is not None for s in geometry.layers] == [k == "sliding_attention" for k in kinds]


def test_defaults_file_is_what_the_config_classes_say() -> None:
    root = Path(__file__).parents[2]
    spec = spec_from_file_location("geometry_defaults", root / "scripts" / "geometry_defaults.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    kept = json.loads(script.TARGET.read_text("utf-8"))
    if kept["transformers"] != transformers.__version__:
        pytest.skip(f"written for transformers {kept['transformers']}; {transformers.__version__} is installed")
    assert script.collect()["model_types"] == kept["model_types"] == class_defaults()
