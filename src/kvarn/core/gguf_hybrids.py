"""GGUF metadata of recurrent and hybrid models, and of models whose config.json nests or renames what GGUF keeps flat.

llama.cpp writes one head count a layer, 0 where a layer does not attend; config.json lists layer types instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarn.core.gguf_header import GGUFError, GGUFHeader

Config = dict[str, Any]


def attending(config: Config) -> list[bool]:
    """Which layers attend, from the KV heads a layer; all of them where there is one number for all."""
    heads = config.get("num_key_value_heads")
    n_layers = config["num_hidden_layers"]
    if not isinstance(heads, list):
        return [bool(heads)] * n_layers
    if len(heads) < n_layers:
        raise GGUFError(f"{len(heads)} KV head counts for {n_layers} layers")
    return [bool(h) for h in heads[:n_layers]]


def _one_number(config: Config, *names: str) -> None:
    """Per-layer arrays whose entries are 0 or one number, as that number."""
    for name in names:
        if isinstance(config.get(name), list):
            config[name] = max(config[name])


def _need(header: GGUFHeader, config: Config, *names: str) -> None:
    if missing := [n for n in names if not isinstance(config.get(n), int)]:
        raise GGUFError(f"{header.path}: {header.architecture} states no {', '.join(missing)}")


def _layer_types(config: Config, other: str) -> None:
    attends = attending(config)
    config["layer_types"] = ["full_attention" if a else other for a in attends]
    _one_number(config, "num_key_value_heads", "num_attention_heads")


def _lfm2(header: GGUFHeader, config: Config) -> None:
    _layer_types(config, "conv")
    config["block_auto_adjust_ff_dim"] = False  # the file states the width as it is
    config["num_dense_layers"] = config.get("first_k_dense_replace", 0)


def _mamba(header: GGUFHeader, config: Config) -> None:
    _need(header, config, "gguf_inner_size", "gguf_state_size", "gguf_conv_kernel", "gguf_time_step_rank")
    config |= {
        "intermediate_size": config["gguf_inner_size"],
        "state_size": config["gguf_state_size"],
        "conv_kernel": config["gguf_conv_kernel"],
        "time_step_rank": config["gguf_time_step_rank"],
    }


def _mamba2(header: GGUFHeader, config: Config) -> None:
    _mamba(header, config)
    n_heads = config["gguf_time_step_rank"]
    config |= {
        "num_heads": n_heads,
        "head_dim": config["gguf_inner_size"] // n_heads,
        "n_groups": config.get("gguf_group_count", 1),
    }


def _mamba_keys(header: GGUFHeader, config: Config) -> None:
    """The mamba_* keys that Falcon-H1, Granite 4 and Jamba share."""
    _need(header, config, "gguf_inner_size", "gguf_state_size", "gguf_conv_kernel", "gguf_time_step_rank")
    config |= {
        "mamba_d_state": config["gguf_state_size"],
        "mamba_d_conv": config["gguf_conv_kernel"],
        "mamba_expand": config["gguf_inner_size"] // config["hidden_size"],
    }


def _mamba2_keys(header: GGUFHeader, config: Config) -> None:
    _mamba_keys(header, config)
    config |= {
        "mamba_n_heads": config["gguf_time_step_rank"],
        "mamba_n_groups": config.get("gguf_group_count", 1),
    }


def _falcon_h1(header: GGUFHeader, config: Config) -> None:
    _mamba2_keys(header, config)
    config |= {
        "mamba_d_ssm": config["gguf_inner_size"],
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in header.tensors,
    }


def _jamba(header: GGUFHeader, config: Config) -> None:
    _mamba_keys(header, config)
    config["mamba_dt_rank"] = config["gguf_time_step_rank"]
    _layer_types(config, "linear_attention")
    sparse = [i for i in range(config["num_hidden_layers"]) if f"blk.{i}.ffn_gate_exps.weight" in header.tensors]
    if len(sparse) > 1:
        config |= {"expert_layer_period": sparse[1] - sparse[0], "expert_layer_offset": sparse[0]}


def _granite_hybrid(header: GGUFHeader, config: Config) -> None:
    _mamba2_keys(header, config)
    _layer_types(config, "linear_attention")
    config.setdefault("num_local_experts", 0)
    shared = config.get("shared_expert_intermediate_size") if config["num_local_experts"] else None
    config["shared_intermediate_size"] = shared or config["intermediate_size"]


def _nemotron_h(header: GGUFHeader, config: Config) -> None:
    """A layer with KV heads attends, one with a width is feed-forward or experts, the rest are Mamba."""
    _need(header, config, "gguf_inner_size", "gguf_state_size", "gguf_conv_kernel", "gguf_time_step_rank")
    n_layers, widths = config["num_hidden_layers"], config.get("intermediate_size")
    widths = widths if isinstance(widths, list) else [widths or 0] * n_layers
    kinds = []
    for i, attends in enumerate(attending(config)):
        has_experts = f"blk.{i}.ffn_up_exps.weight" in header.tensors
        kinds.append("attention" if attends else "moe" if has_experts else "mlp" if widths[i] else "mamba")
    _one_number(config, "num_key_value_heads", "num_attention_heads", "intermediate_size")
    n_heads = config["gguf_time_step_rank"]
    config |= {
        "layers_block_type": kinds,
        "mamba_num_heads": n_heads,
        "mamba_head_dim": config["gguf_inner_size"] // n_heads,
        "n_groups": config.get("gguf_group_count", 1),
        "ssm_state_size": config["gguf_state_size"],
        "conv_kernel": config["gguf_conv_kernel"],
    }
    if shared := config.get("shared_expert_intermediate_size"):
        config["moe_shared_expert_intermediate_size"] = shared


def _delta_net(header: GGUFHeader, config: Config) -> None:
    """Qwen3-Next, Qwen3.5: heads of the recurrent layers in Mamba's words (src/llama-model.cpp, LLM_ARCH_QWEN3NEXT)."""
    _need(header, config, "gguf_inner_size", "gguf_state_size", "gguf_conv_kernel", "gguf_time_step_rank")
    values = config["gguf_time_step_rank"]
    config |= {
        "linear_num_value_heads": values,
        "linear_num_key_heads": config.get("gguf_group_count", values),
        "linear_key_head_dim": config["gguf_state_size"],
        "linear_value_head_dim": config["gguf_inner_size"] // values,
        "linear_conv_kernel_dim": config["gguf_conv_kernel"],
    }
    _one_number(config, "num_key_value_heads", "num_attention_heads")
    if extra := config.get("num_nextn_predict_layers"):
        config["num_hidden_layers"] -= extra


def _kimi_linear(header: GGUFHeader, config: Config) -> None:
    n_layers = config["num_hidden_layers"]
    full = [i + 1 for i, attends in enumerate(attending(config)) if attends]
    heads = config["num_attention_heads"]
    n_heads = max(heads) if isinstance(heads, list) else heads
    config["num_attention_heads"] = config["num_key_value_heads"] = n_heads
    rope = header.get("rope.dimension_count", 64)
    k_dim = header.get("attention.key_length_mla", header.get("attention.key_length", 192))
    config |= {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": k_dim - rope,
        "v_head_dim": header.get("attention.value_length_mla", header.get("attention.value_length", 128)),
        "linear_attn_config": {
            "full_attn_layers": full if len(full) < n_layers else None,
            "num_heads": n_heads,
            "head_dim": config.get("gguf_kda_head_dim", 128),
            "short_conv_kernel_size": config.get("gguf_conv_kernel", 4),
        },
    }
    config.pop("head_dim", None)


def _llama4(header: GGUFHeader, config: Config) -> None:
    """feed_forward_length is the dense layers' width, expert_feed_forward_length the experts'."""
    config["intermediate_size_mlp"] = config["intermediate_size"]
    config["intermediate_size"] = config.get("moe_intermediate_size", config["intermediate_size"])
    config["attention_chunk_size"] = header.get("attention.chunk_size", 8192)
    config.setdefault("interleave_moe_layer_step", 1)


def _dbrx(header: GGUFHeader, config: Config) -> None:
    config |= {
        "d_model": config["hidden_size"],
        "n_heads": config.pop("num_attention_heads"),
        "n_layers": config.pop("num_hidden_layers"),
        "attn_config": {"kv_n_heads": config.pop("num_key_value_heads")},
        "ffn_config": {
            "ffn_hidden_size": config["intermediate_size"],
            "moe_num_experts": config.pop("num_experts", None),
            "moe_top_k": config.pop("num_experts_per_tok", None),
        },
    }
    config.pop("head_dim")


def _falcon(header: GGUFHeader, config: Config) -> None:
    kv, query = config["num_key_value_heads"], config["num_attention_heads"]
    config |= {
        "new_decoder_architecture": "blk.0.attn_norm_2.weight" in header.tensors or 1 < kv < query,
        "num_kv_heads": kv,
        "multi_query": kv == 1,
    }


def _gpt2(header: GGUFHeader, config: Config) -> None:
    config["n_positions"] = config["max_position_embeddings"]
    config["multi_query"] = config["num_key_value_heads"] == 1 and config["num_attention_heads"] > 1


HYBRIDS: dict[str, Callable[[GGUFHeader, Config], None]] = {
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "qwen3_next": _delta_net,
    "qwen3_5_text": _delta_net,
    "qwen3_5_moe_text": _delta_net,
    "kimi_linear": _kimi_linear,
    "llama4_text": _llama4,
    "dbrx": _dbrx,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
}
