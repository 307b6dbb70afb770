"""Every kind of cache from a config of its kind, and everything that must be refused or flagged."""

from __future__ import annotations

from typing import Any

import pytest

from kvarn.core.errors import ConfigError, InvalidRequest, UnknownArchitecture
from kvarn.core.geometry import geometry_from_factors, geometry_of, known_model_types
from kvarn.core.specs import LayerKind, LayerSpec, StateTensor

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 256}
MOE = {"moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}


def layers(**changes: Any) -> tuple[LayerSpec, ...]:
    return geometry_of(LLAMA | changes).layers


def windows(**changes: Any) -> list[int | None]:
    return [spec.window_tokens for spec in layers(**changes)]


@pytest.mark.parametrize(("kv_heads", "elements"), [(8, 2 * 8 * 64), (2, 2 * 2 * 64), (1, 2 * 64)])
def test_mha_gqa_mqa(kv_heads: int, elements: int) -> None:
    found = layers(num_key_value_heads=kv_heads)
    assert len(found) == 12
    assert {s.elements_per_token for s in found} == {elements}
    assert {s.kind for s in found} == {LayerKind.ATTENTION}


def test_kv_heads_default_to_query_heads_where_unstated_or_null() -> None:
    unstated = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert geometry_of(unstated).layers[0].kv_heads == 8
    assert layers(num_key_value_heads=None)[0].kv_heads == 8


def test_a_stated_head_dim_counts_and_not_hidden_by_heads() -> None:
    assert layers(head_dim=128)[0].k_dim == 128
    assert layers(head_dim=None)[0].k_dim == 64


def test_latent_attention_stores_latent_and_rope_once() -> None:
    found = geometry_of(LLAMA | MLA | MOE | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1})
    assert {s.elements_per_token for s in found.layers} == {576}
    assert found.layers[0].kind is LayerKind.LATENT
    assert found.layers[0].query_heads == 8
    assert found.drafts == (found.layers[-1],)
    assert found.parameters is not None
    assert found.parameters.drafts > 0


def test_indexer_keys_are_stored_only_where_the_indexer_runs() -> None:
    sparse = LLAMA | MLA | MOE | {"model_type": "glm_moe_dsa", "index_head_dim": 128, "index_n_heads": 4}
    assert [s.index_dim for s in geometry_of(sparse).layers] == [128] * 12
    every_fourth = geometry_of(sparse | {"index_topk_freq": 4}).layers
    assert [s.index_dim for s in every_fourth] == [128, 128, 0, 0, 0, 128, 0, 0, 0, 128, 0, 0]
    stated = geometry_of(sparse | {"indexer_types": ["full"] + ["shared"] * 11}).layers
    assert sum(s.index_dim for s in stated) == 128


def test_windows_by_architecture() -> None:
    assert windows() == [None] * 12
    assert windows(model_type="mistral", sliding_window=256) == [256] * 12
    assert windows(model_type="mistral", sliding_window=None) == [None] * 12, "null switches the class's default off"
    assert windows(model_type="gemma2", sliding_window=256) == [256, None] * 6
    assert windows(model_type="gemma3_text", sliding_window=256) == ([256] * 5 + [None]) * 2
    assert windows(model_type="cohere2", sliding_window=256) == ([256] * 3 + [None]) * 3
    assert windows(model_type="olmo3", sliding_window=256) == ([256] * 3 + [None]) * 3
    assert windows(model_type="cwm", sliding_window=256) == ([None] + [256] * 3) * 3
    assert windows(model_type="exaone4", sliding_window=256, sliding_window_pattern="LLLG")[-2:] == [256, None]


def test_windows_that_the_config_lists_or_switches_off() -> None:
    kinds = ["full_attention", "sliding_attention"] * 6
    assert windows(model_type="gemma3_text", sliding_window=256, layer_types=kinds) == [None, 256] * 6
    assert windows(model_type="gemma3_text", sliding_window=256, sliding_window_pattern=2) == [256, None] * 6
    off = {"model_type": "qwen2", "sliding_window": 256, "use_sliding_window": False, "max_window_layers": 3}
    assert windows(**off) == [None] * 12
    assert windows(**off | {"use_sliding_window": True}) == [None] * 3 + [256] * 9
    with pytest.raises(ConfigError, match="layer_types has 3 entries for 12 layers"):
        windows(model_type="gemma3_text", layer_types=["full_attention"] * 3)
    with pytest.raises(ConfigError, match="spiral_attention"):
        windows(model_type="gemma3_text", layer_types=["spiral_attention"] * 12)


def test_chunks_of_llama4() -> None:
    moe = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 2048, "head_dim": 64}
    found = layers(model_type="llama4_text", attention_chunk_size=128, **moe)
    assert [s.chunk_tokens for s in found] == ([128] * 3 + [None]) * 3
    stated = layers(model_type="llama4_text", attention_chunk_size=128, no_rope_layers=[0] * 11 + [1], **moe)
    assert [s.chunk_tokens for s in stated] == [None] * 11 + [128]


def test_cross_layer_sharing_reads_the_last_layer_of_its_kind() -> None:
    found = layers(model_type="gemma4_text", num_kv_shared_layers=5, hidden_size_per_layer_input=0, head_dim=32)
    assert [s.shares_layer for s in found] == [None] * 7 + [6, 6, 6, 6, 5]
    assert [s.elements_per_token for s in found[7:]] == [0] * 5
    assert found[5].k_dim == 512, "a full layer has the global head dim"
    assert found[0].k_dim == 32
    with pytest.raises(ConfigError, match="at least one must store"):
        layers(model_type="gemma4_text", num_kv_shared_layers=12, hidden_size_per_layer_input=0)
    hunyuan = layers(model_type="hunyuan", use_cla=True, cla_share_factor=2, num_experts=1, moe_topk=1)
    assert [s.shares_layer for s in hunyuan] == [x for i in range(0, 12, 2) for x in (None, i)]


def test_full_layers_of_gemma4_have_heads_of_their_own() -> None:
    own = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "head_dim": 32}
    found = layers(model_type="gemma4_text", **own)
    assert [(s.kv_heads, s.k_dim) for s in found[4:6]] == [(2, 32), (1, 512)]
    newer = {"per_layer_config": {5: {"head_dim": 512, "num_key_value_heads": 1}}, "attention_k_eq_v": True}
    assert layers(model_type="gemma4_text", hidden_size_per_layer_input=0, **newer)[5].kv_heads == 1


def test_heads_may_differ_by_layer() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 2.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 2.0}},
        {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
    ]
    found = layers(model_type="nemotron-nas", num_hidden_layers=3, block_configs=blocks)
    assert [(s.kv_heads, s.kind) for s in found] == [
        (2, LayerKind.ATTENTION),
        (0, LayerKind.NONE),
        (0, LayerKind.NONE),
    ]


def test_window_layers_may_have_other_heads_and_wider_keys() -> None:
    found = layers(model_type="mimo_v2_flash", head_dim=192, v_head_dim=128, sliding_window_size=128, **MOE)
    full, local = found[0], found[1]
    assert (full.kv_heads, full.k_dim, full.v_dim, full.window_tokens) == (2, 192, 128, None)
    assert (local.kv_heads, local.window_tokens) == (4, 129)


def test_state_beside_and_instead_of_attention() -> None:
    falcon = layers(model_type="falcon_h1", mamba_d_ssm=1024, mamba_n_heads=16, mamba_d_state=128, mamba_n_groups=1)
    assert falcon[0].kind is LayerKind.ATTENTION
    assert falcon[0].state == (
        StateTensor("conv", (1024 + 256) * 3, "bfloat16", 3),
        StateTensor("ssm", 1024 * 128, "float32"),
    )
    jamba = layers(model_type="jamba", num_experts=1, attn_layer_period=4, attn_layer_offset=1)
    assert [s.kind is LayerKind.ATTENTION for s in jamba] == [i % 4 == 1 for i in range(12)]
    pure = geometry_of({"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100})
    assert {s.elements_per_token for s in pure.layers} == {0}
    assert pure.layers[0].state_bytes == 128 * 3 * 2 + 128 * 16 * 4


def test_gated_delta_net_layers() -> None:
    delta = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    delta |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "bfloat16"}
    found = geometry_of(LLAMA | delta | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1})
    assert [s.kv_heads for s in found.layers] == [0, 0, 0, 2] * 3
    assert found.layers[0].state_bytes == 8192 * 3 * 2 + 32 * 128 * 128 * 2
    assert [s.kv_heads for s in found.drafts] == [2], "the draft layer attends"


def test_short_convolutions_keep_one_column_less_than_their_kernel() -> None:
    found = layers(model_type="lfm2", conv_L_cache=3, full_attn_idxs=[2, 5])
    assert [s.kv_heads for s in found[:3]] == [0, 0, 2]
    assert found[0].state == (StateTensor("conv", 512 * 2, "bfloat16", 2),)


def test_compressed_entries_stay_beside_the_window() -> None:
    v4 = LLAMA | MOE | {"model_type": "deepseek_v4", "head_dim": 512, "sliding_window": 128, "q_lora_rank": 256}
    v4 |= {"compress_ratios": [0, 4, 128] * 4, "index_head_dim": 128, "o_groups": 2, "num_nextn_predict_layers": 0}
    plain, sparse, heavy = geometry_of(v4).layers[:3]
    assert {s.window_tokens for s in (plain, sparse, heavy)} == {128}
    assert (plain.elements_per_token, plain.compressed_elements(1000)) == (512, 0)
    assert sparse.compressed_elements(1000) == 250 * (512 + 128)
    assert heavy.compressed_elements(1000) == 7 * 512
    with pytest.raises(ConfigError, match="compress_ratios"):
        geometry_of(v4 | {"compress_ratios": [16] * 12})


def test_the_language_model_of_a_multimodal_config() -> None:
    outer = {"model_type": "gemma3", "text_config": LLAMA | {"model_type": "gemma3_text"}, "vision_config": {}}
    found = geometry_of(outer)
    assert found.layers[0].kv_heads == 2
    assert any("vision" in note for note in found.notes)
    named_outside = {"model_type": "qwen2_vl", "text_config": {k: v for k, v in LLAMA.items() if k != "model_type"}}
    assert len(geometry_of(named_outside).layers) == 12


def test_class_defaults_fill_what_a_file_leaves_out_and_are_noted() -> None:
    """The published config.json of Gemma 3 4B states neither heads nor head_dim."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    found = geometry_of({"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}})
    assert (found.layers[0].query_heads, found.layers[0].kv_heads, found.layers[0].k_dim) == (8, 4, 256)
    assert sum("num_attention_heads" in note for note in found.notes) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, "t5 is an encoder-decoder"),
        ({"model_type": "whisper"}, "whisper is an encoder-decoder"),
        ({"model_type": "bert"}, "bert is an encoder"),
        (LLAMA | {"is_encoder_decoder": True}, "encoder-decoder"),
        (LLAMA | {"model_type": "llamma"}, "'llamma' is not known"),
    ],
)
def test_other_architectures_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownArchitecture, match=message):
        geometry_of(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "no model_type"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776"),
        ({"num_hidden_layers": "12"}, "num_hidden_layers is '12'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 12.5}, "num_hidden_layers is 12.5"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "8 query heads do not divide into 3"),
        ({"num_key_value_heads": [2] * 12}, "an integer is expected"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "512 does not divide by 7"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"sliding_window": -5, "model_type": "mistral"}, "sliding_window is -5"),
    ],
)
def test_bad_values_are_refused_in_words(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        geometry_of(LLAMA | change)


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="JSON object"):
        geometry_of([])  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        geometry_of({})


@pytest.mark.parametrize(
    "key",
    [
        "kv_cache_compression",
        "num_latent_tokens",
        "cross_layer_kv_share",
        "attention_window_pattern",
        "ssm_heads",
        "cla_factor",
    ],
)
def test_unknown_keys_that_look_like_cache_geometry_are_flagged(key: str) -> None:
    found = geometry_of(LLAMA | {key: 4})
    assert found.unknown_keys == (key,)
    assert any(key in note for note in found.notes)
    assert geometry_of(LLAMA | {key: None}).unknown_keys == ()


def test_harmless_keys_are_not_flagged() -> None:
    harmless = {"use_cache": True, "initializer_range": 0.02, "rope_theta": 1e6, "bos_token_id": 1, "pretraining_tp": 2}
    harmless |= {"rope_scaling": {"factor": 8.0}, "transformers_version": "4.40", "attention_dropout": 0.1}
    assert geometry_of(LLAMA | harmless).unknown_keys == ()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ""),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "int4"),
    ],
)
def test_published_quantization(config: dict[str, Any], expected: str) -> None:
    assert geometry_of(LLAMA | {"quantization_config": config or None}).weight_format == expected


def test_unknown_quantization_is_noted() -> None:
    found = geometry_of(LLAMA | {"quantization_config": {"quant_method": "aqlm"}})
    assert (found.weight_format, len(found.notes)) == ("", 1)


def test_parameters_of_a_mixture_of_experts() -> None:
    moe = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    found = geometry_of(moe).parameters
    assert found is not None
    assert found.experts == 12 * 8 * 3 * 512 * 1024
    assert found.active_experts == 12 * 2 * 3 * 512 * 1024
    assert found.total - found.active == found.experts - found.active_experts


def test_tied_embeddings_have_no_head() -> None:
    tied, untied = geometry_of(LLAMA | {"tie_word_embeddings": True}), geometry_of(LLAMA)
    assert (tied.tied_embeddings, untied.tied_embeddings) == (True, False)
    assert tied.parameters is not None
    assert untied.parameters is not None
    assert untied.parameters.total - tied.parameters.total == untied.parameters.output == 512 * 1000


def test_factors() -> None:
    found = geometry_from_factors(80, 8, 128, query_heads=64, hidden_size=8192)
    assert sum(s.elements_per_token for s in found.layers) * 2 == 327_680
    assert found.notes == ()
    assert len(geometry_from_factors(40, 32, 128).notes) == 2
    for bad in ({"layers": 0}, {"kv_heads": -1}, {"head_dim": 1 << 40}, {"layers": 1 << 20}, {"query_heads": 9}):
        with pytest.raises(InvalidRequest):
            geometry_from_factors(**({"layers": 1, "kv_heads": 8, "head_dim": 128} | bad))


def test_the_architectures_people_use_are_known() -> None:
    wanted = "llama mistral mixtral qwen2 qwen3 qwen3_moe qwen3_next qwen3_5 gemma gemma2 gemma3 gemma3n gemma4 phi3 "
    wanted += (
        "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 kimi_linear glm_moe_dsa gpt_oss llama4 cohere cohere2 mamba "
    )
    wanted += (
        "mamba2 jamba nemotron_h falcon falcon_h1 lfm2 granite granitemoehybrid minicpm starcoder2 opt gpt2 gpt_neox"
    )
    assert set(wanted.split()) <= set(known_model_types())
