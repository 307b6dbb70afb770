"""GGUF metadata in config.json's words: against transformers' own mapping, and for what transformers does not map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvarn.core.errors import UnknownArchitecture
from kvarn.core.geometry import geometry_of
from kvarn.core.geometry.build import known_model_types
from kvarn.core.gguf_config import config_from_gguf
from kvarn.core.gguf_header import GGUFError, GGUFHeader, GGUFTensor, read_gguf_header
from kvarn.core.gguf_words import MODEL_TYPES

BASE = {
    "block_count": 12,
    "embedding_length": 1024,
    "feed_forward_length": 4096,
    "context_length": 8192,
    "attention.head_count": 16,
    "attention.head_count_kv": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 500000.0,
}


def header(architecture: str, *, tensors: tuple[str, ...] = (), **values: Any) -> GGUFHeader:
    """A header of `architecture`; keyword names have _ for . where a key has one."""
    own = {k: v for k, v in (BASE | values).items() if v is not None}
    metadata = {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in own.items()}
    names = ("token_embd.weight", *tensors)
    infos = {n: GGUFTensor(n, (1000, 1024), "F16", 0, 2048000) for n in names}
    return GGUFHeader(Path("test.gguf"), 3, metadata, infos)


def test_llama() -> None:
    config = config_from_gguf(header("llama", tensors=("output.weight",)))
    assert config["model_type"] == "llama"
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (12, 4, 64)
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (1000, False)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert config_from_gguf(header("llama"))["tie_word_embeddings"] is True


def test_llama_with_experts_is_mixtral_and_with_a_window_mistral() -> None:
    mixtral = config_from_gguf(header("llama", **{"expert_count": 8, "expert_used_count": 2}))
    assert (mixtral["model_type"], mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == ("mixtral", 8, 2)
    mistral = config_from_gguf(header("llama", **{"attention.sliding_window": 4096}))
    assert (mistral["model_type"], mistral["sliding_window"]) == ("mistral", 4096)


def test_rope_factors_that_are_tensors_are_named() -> None:
    llama3 = config_from_gguf(header("llama", tensors=("rope_freqs.weight",)))["rope_parameters"]
    assert llama3 == {"rope_type": "tensor", "rope_theta": 500000.0, "factors_tensor": "rope_freqs.weight"}
    phi = config_from_gguf(
        header(
            "phi3",
            tensors=("rope_factors_long.weight", "rope_factors_short.weight"),
            **{"rope.scaling.original_context_length": 4096, "rope.scaling.attn_factor": 1.19},
        )
    )["rope_parameters"]
    assert phi["rope_type"] == "longrope"
    assert (phi["original_max_position_embeddings"], phi["factor"], phi["attention_factor"]) == (4096, 2.0, 1.19)
    yarn = config_from_gguf(header("qwen2", **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}))
    assert (yarn["rope_parameters"]["rope_type"], yarn["rope_scaling"]["factor"]) == ("yarn", 4.0)


def test_gemma3_slides_in_five_of_six_layers_with_a_base_of_its_own() -> None:
    config = config_from_gguf(header("gemma3", **{"attention.key_length": 256, "attention.sliding_window": 512}))
    assert config["model_type"] == "gemma3_text"
    assert [t == "full_attention" for t in config["layer_types"]] == [i % 6 == 5 for i in range(12)]
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 500000.0
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 10000.0
    assert (config["query_pre_attn_scalar"], config["hidden_activation"]) == (256, "gelu_pytorch_tanh")


def test_gemma4_states_its_pattern_and_heads_a_layer() -> None:
    pattern = tuple(i % 6 != 5 for i in range(12))
    config = config_from_gguf(
        header(
            "gemma4",
            **{
                "attention.key_length": 512,
                "attention.key_length_swa": 256,
                "attention.sliding_window": 1024,
                "attention.sliding_window_pattern": pattern,
                "attention.head_count_kv": tuple(8 if slides else 1 for slides in pattern),
            },
        )
    )
    geometry = geometry_of(config | {"attention_k_eq_v": True})
    assert [(s.kv_heads, s.k_dim, s.window_tokens) for s in geometry.layers[4:6]] == [(8, 256, 1024), (1, 512, None)]


def test_latent_attention_in_both_spellings() -> None:
    common = {"attention.kv_lora_rank": 512, "attention.q_lora_rank": 1536, "rope.dimension_count": 64}
    common |= {"attention.head_count": 16, "attention.head_count_kv": 1, "leading_dense_block_count": 1}
    common |= {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256, "expert_shared_count": 1}
    old = common | {"attention.key_length": 192, "attention.value_length": 128}
    new = common | {"attention.key_length": 576, "attention.value_length": 512}
    new |= {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
    for values in (old, new):
        config = config_from_gguf(header("deepseek2", **values))
        assert (config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]) == (128, 64, 128)
        assert geometry_of(config).layers[0].elements_per_token == 576


def test_a_per_layer_array_stays_per_layer() -> None:
    heads = (0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0)
    config = config_from_gguf(header("lfm2", **{"attention.head_count_kv": heads, "shortconv.l_cache": 3}))
    geometry = geometry_of(config)
    assert [s.kv_heads for s in geometry.layers] == list(heads)


def test_what_is_missing_or_unknown_is_said() -> None:
    with pytest.raises(UnknownArchitecture, match="wavenet"):
        config_from_gguf(header("wavenet"))
    with pytest.raises(GGUFError, match="num_hidden_layers"):
        config_from_gguf(header("llama", block_count=None))
    empty = GGUFHeader(Path("test.gguf"), 3, {}, {})
    with pytest.raises(GGUFError, match=r"general\.architecture"):
        config_from_gguf(empty)


def test_every_mapped_architecture_has_a_geometry() -> None:
    assert set(MODEL_TYPES.values()) <= set(known_model_types())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_agrees_with_transformers(tmp_path: Path, architecture: str) -> None:
    """The keys that transformers reads from the same file have the same values."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("test")
    writer.add_block_count(12)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_context_length(8192)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(40)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(512)
    writer.add_tensor("token_embd.weight", np.zeros((40, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: PLC0415

    theirs = load_gguf_checkpoint(str(path))["config"]
    ours = config_from_gguf(read_gguf_header(path))
    shared = set(theirs) & set(ours)
    assert {"num_hidden_layers", "num_key_value_heads", "hidden_size", "rms_norm_eps", "model_type"} <= shared
    for key in shared:
        assert ours[key] == pytest.approx(theirs[key]) if isinstance(ours[key], float) else ours[key] == theirs[key], (
            key
        )


SSM = {"ssm.inner_size": 2048, "ssm.state_size": 128, "ssm.conv_kernel": 4, "ssm.time_step_rank": 32}
SSM |= {"ssm.group_count": 16}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256}
EXPERTS |= {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_shared_feed_forward_length": 512}
MLA = {"attention.kv_lora_rank": 512, "attention.key_length": 192, "attention.value_length": 128}
SOME_ATTEND = {"attention.head_count_kv": tuple(4 if i % 4 == 3 else 0 for i in range(12))}
NO_HEADS = {"attention.head_count": None, "attention.head_count_kv": None}
EXTRA: dict[str, dict[str, Any]] = {
    "glm-dsa": MLA
    | {"attention.q_lora_rank": 256, "attention.indexer.key_length": 128, "attention.indexer.head_count": 4},
    "deepseek2": MLA,
    "minicpm3": MLA,
    "kimi-linear": MLA | SSM | SOME_ATTEND | {"kda.head_dim": 128},
    "mamba": SSM | NO_HEADS,
    "mamba2": SSM | NO_HEADS,
    "jamba": SSM | SOME_ATTEND,
    "falcon-h1": SSM,
    "granitehybrid": SSM | SOME_ATTEND,
    "nemotron_h": SSM | SOME_ATTEND | {"feed_forward_length": tuple(64 if i % 4 == 1 else 0 for i in range(12))},
    "nemotron_h_moe": SSM | SOME_ATTEND | {"feed_forward_length": tuple(64 if i % 4 == 1 else 0 for i in range(12))},
    "qwen3next": SSM,
    "qwen35": SSM,
    "qwen35moe": SSM,
    "lfm2": SOME_ATTEND | {"shortconv.l_cache": 3},
    "lfm2moe": SOME_ATTEND | {"shortconv.l_cache": 3},
    **{name: {"attention.head_count_kv": 16} for name in ("gpt2", "gptj", "gptneox", "bloom", "mpt")},
    "starcoder": {"attention.head_count_kv": 1},
    "falcon": {"attention.head_count_kv": 1},
    "gemma3n": {"attention.shared_kv_layers": 2, "attention.sliding_window": 512},
    "deci": {"attention.head_count_kv": (4,) * 11 + (0,), "feed_forward_length": (64,) * 12},
}


@pytest.mark.parametrize("architecture", sorted(MODEL_TYPES))
def test_every_architecture_gets_a_geometry_that_counts(architecture: str) -> None:
    """From a minimal header: as many layers as blocks, and a cache of exactly the heads that the header states."""
    moe = "moe" in architecture or architecture in (
        "deepseek2",
        "glm-dsa",
        "gpt-oss",
        "dbrx",
        "olmoe",
        "llama4",
        "jamba",
    )
    moe = moe or architecture in ("minimax-m2", "mimo2", "kimi-linear", "qwen3next")
    values = (EXPERTS if moe else {}) | EXTRA.get(architecture, {})
    if architecture == "glm4moe":
        values["attention.key_length"] = 64
    geometry = geometry_of(config_from_gguf(header(architecture, **values)))
    assert len(geometry.layers) == 12
    assert geometry.unknown_keys == (), "the translation states only what geometries read"
    assert geometry.parameters is not None
    assert geometry.parameters.total > 0
    stated = values.get("attention.head_count_kv")
    if isinstance(stated, tuple) and architecture != "kimi-linear":
        assert [s.kv_heads for s in geometry.layers] == list(stated)
    if isinstance(stated, int):
        assert {s.kv_heads for s in geometry.layers} == {stated}


def test_gated_delta_net_keeps_the_published_state() -> None:
    """Qwen3.5 35B-A3B: 8192 convolution channels of 3 columns, 32 heads of 128 x 128 in float32."""
    values = {"ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.conv_kernel": 4, "ssm.time_step_rank": 32}
    values |= {"ssm.group_count": 16, "full_attention_interval": 4, "attention.key_length": 256}
    geometry = geometry_of(config_from_gguf(header("qwen35", **values)))
    conv, ssm = geometry.layers[0].state
    assert (conv.elements, conv.columns, ssm.elements, ssm.dtype) == (8192 * 3, 3, 32 * 128 * 128, "float32")
    assert [bool(s.kv_heads) for s in geometry.layers] == [i % 4 == 3 for i in range(12)]
