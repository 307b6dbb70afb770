"""GGUF metadata -> a config in the vocabulary of Hugging Face's config.json, so that a model's geometry and its
architecture are read in one way whatever the file. No torch.

The metadata's meaning is that of llama.cpp (gguf-py/gguf/constants.py for the names; src/llama-model.cpp for what a
model assumes that its file does not say, marked "assumed" here).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarn.core.errors import UnknownArchitecture
from kvarn.core.gguf_header import GGUFArray, GGUFError, GGUFHeader
from kvarn.core.gguf_hybrids import HYBRIDS
from kvarn.core.gguf_words import EXPERTS_KEY, GELU, GELU_TANH, KEYS, MODEL_TYPES, SLIDING_PERIOD

Config = dict[str, Any]


def config_from_gguf(header: GGUFHeader) -> Config:
    """The config.json that `header`'s model would have.

    Rotary settings stand both as transformers 5's `rope_parameters` and as the older `rope_theta`, `rope_scaling`.
    Where the frequencies' factors are a tensor of the file, `rope_parameters` has rope_type "tensor" and names it
    (`factors_tensor`: each frequency is divided by its factor; phi3: `long_factors_tensor`, `short_factors_tensor`).
    Raises UnknownArchitecture, and GGUFError where a key that every model has is missing.
    """
    config = _common(header)
    _heads(header, config)
    _experts(header, config)
    _layer_types(header, config)
    _rope(header, config)
    if refine := _REFINEMENTS.get(config["model_type"]):
        refine(header, config)
    return {name: value for name, value in config.items() if not name.startswith("gguf_")}


def _common(header: GGUFHeader) -> Config:
    architecture = header.architecture
    if architecture not in MODEL_TYPES:
        raise UnknownArchitecture(f"{header.path}: GGUF architecture {architecture!r}; known: {', '.join(MODEL_TYPES)}")
    config: Config = {"model_type": MODEL_TYPES[architecture]}
    for suffix, name in KEYS.items():
        value = header.get(suffix)
        if value is not None:
            config[name] = list(value) if isinstance(value, tuple) else value
    for name in ("num_hidden_layers", "hidden_size"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise GGUFError(f"{header.path}: {architecture} states {name} as {config.get(name)!r}")
    config["vocab_size"] = _vocab_size(header)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors or "blk.0.attn_qkv.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    config["hidden_act"] = _activation(config["model_type"])
    _token_ids(header, config)
    return config


def _vocab_size(header: GGUFHeader) -> int:
    if table := header.tensors.get("token_embd.weight"):
        return table.shape[0]
    if isinstance(stated := header.get("vocab_size"), int):
        return stated
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, (tuple, GGUFArray)):
        return len(tokens)
    raise GGUFError(f"{header.path}: no token_embd.weight, vocab_size or tokens to read the vocabulary's size from")


def _activation(model_type: str) -> str:
    if model_type in GELU_TANH:
        return "gelu_pytorch_tanh"
    return "gelu" if model_type in GELU else "relu2" if model_type in ("nemotron", "nemotron_h") else "silu"


def _token_ids(header: GGUFHeader, config: Config) -> None:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
    for gguf_name, name in names.items():
        if (value := header.metadata.get(f"tokenizer.ggml.{gguf_name}_token_id")) is not None:
            config[name] = value


def _heads(header: GGUFHeader, config: Config) -> None:
    heads = config.get("num_attention_heads")
    if not heads:
        return
    config.setdefault("num_key_value_heads", heads)
    most = max(heads) if isinstance(heads, list) else heads
    # llama.cpp's default where no key_length is written (llama-hparams: n_embd / n_head)
    config["head_dim"] = header.get("attention.key_length", config["hidden_size"] // most)
    v_dim = header.get("attention.value_length", config["head_dim"])
    if v_dim != config["head_dim"]:
        config["v_head_dim"] = v_dim


def _experts(header: GGUFHeader, config: Config) -> None:
    count = header.get("expert_count")
    if not count:
        return
    if config["model_type"] == "llama":
        config["model_type"] = "mixtral"
    config[EXPERTS_KEY.get(config["model_type"], "num_experts")] = count


def _layer_types(header: GGUFHeader, config: Config) -> None:
    model_type, window = config["model_type"], config.get("sliding_window")
    if not window or model_type == "llama4_text":
        return
    layers = range(config["num_hidden_layers"])
    pattern = header.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        slides = [bool(pattern[i % len(pattern)]) for i in layers]
    else:
        period = pattern if isinstance(pattern, int) and pattern else SLIDING_PERIOD.get(model_type)
        if period is None:
            return
        slides = [i % period < period - 1 for i in layers]
    config["layer_types"] = ["sliding_attention" if s else "full_attention" for s in slides]


def _rope(header: GGUFHeader, config: Config) -> None:
    theta = header.get("rope.freq_base", 10000.0)
    rope: Config = {"rope_type": "default", "rope_theta": theta}
    dims, head_dim = header.get("rope.dimension_count"), config.get("head_dim")
    if dims and head_dim and dims != head_dim and "kv_lora_rank" not in config:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"] = dims / head_dim
    rope |= _rope_scaling(header, config)
    config["rope_theta"], config["rope_parameters"] = theta, rope
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}


def _rope_scaling(header: GGUFHeader, config: Config) -> Config:
    """The scaling part of rope_parameters; empty where frequencies are plain."""
    kind, original = header.get("rope.scaling.type"), header.get("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in header.tensors:
        found: Config = {
            "rope_type": "longrope",
            "long_factors_tensor": "rope_factors_long.weight",
            "short_factors_tensor": "rope_factors_short.weight",
        }
        if original:
            found["original_max_position_embeddings"] = config["original_max_position_embeddings"] = original
            found["factor"] = config.get("max_position_embeddings", original) / original
        if attention := header.get("rope.scaling.attn_factor"):
            found["attention_factor"] = attention
        return found
    if "rope_freqs.weight" in header.tensors:
        return {"rope_type": "tensor", "factors_tensor": "rope_freqs.weight"}
    if kind not in ("linear", "yarn"):
        return {}
    found = {"rope_type": kind, "factor": header.get("rope.scaling.factor", 1.0)}
    extra = {
        "original_max_position_embeddings": original,
        "beta_fast": header.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": header.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": header.get("rope.scaling.attn_factor"),
    }
    return found | {k: v for k, v in extra.items() if v is not None}


def _qwen_bias(header: GGUFHeader, config: Config) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors


def _llama(header: GGUFHeader, config: Config) -> None:
    if config.get("sliding_window"):
        config["model_type"] = "mistral"


def _gemma(header: GGUFHeader, config: Config) -> None:
    config["hidden_activation"] = config["hidden_act"]


def _gemma2(header: GGUFHeader, config: Config) -> None:
    """Assumed: Gemma 2 27B (46 layers) and Gemma 3 27B (62) scale queries by hidden / heads, the others by head_dim."""
    _gemma(header, config)
    wide = config["num_hidden_layers"] in (46, 62)
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    )
    config.setdefault("sliding_window", 4096)
    if config["model_type"] == "gemma2":
        config.setdefault("attn_logit_softcapping", 50.0)
        config.setdefault("final_logit_softcapping", 30.0)


def _gemma3(header: GGUFHeader, config: Config) -> None:
    """Assumed: sliding layers rotate with base 10000 and unscaled, whatever the global layers do."""
    _gemma2(header, config)
    local = header.get("rope.freq_base_swa", 10000.0)
    config["rope_local_base_freq"] = local
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _gemma4(header: GGUFHeader, config: Config) -> None:
    """Key lengths stand apart for sliding layers; head_count_kv may be one number a layer."""
    _gemma(header, config)
    config["global_head_dim"] = config["head_dim"]
    config["head_dim"] = header.get("attention.key_length_swa", config["global_head_dim"])
    heads, kinds = config["num_key_value_heads"], config.get("layer_types", [])
    if isinstance(heads, list):
        by_kind = {kind: {n for n, k in zip(heads, kinds, strict=True) if k == kind} for kind in set(kinds)}
        local, full = by_kind.get("sliding_attention", set()), by_kind.get("full_attention", set())
        if len(local) == 1 and len(full) == 1:
            config["num_key_value_heads"], config["num_global_key_value_heads"] = local.pop(), full.pop()
    config.setdefault("num_kv_shared_layers", 0)
    full_rope = config["rope_parameters"]
    config["rope_parameters"] = {
        "full_attention": full_rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", 10000.0)},
    }


def _mla(header: GGUFHeader, config: Config) -> None:
    """Head sizes of multi-head latent attention. Newer files state them as *_mla beside the latent's own lengths."""
    rope_dim = header.get("rope.dimension_count", 64)
    k_dim = header.get("attention.key_length_mla", config["head_dim"])
    v_dim = header.get("attention.value_length_mla", config.get("v_head_dim", config["head_dim"]))
    config.pop("head_dim")
    config |= {"qk_rope_head_dim": rope_dim, "qk_nope_head_dim": k_dim - rope_dim, "v_head_dim": v_dim}
    config["num_key_value_heads"] = config["num_attention_heads"]
    # block_count includes the next-token-prediction layers in newer files; num_hidden_layers never does
    if extra := config.get("num_nextn_predict_layers"):
        config["num_hidden_layers"] -= extra


def _nextn(header: GGUFHeader, config: Config) -> None:
    if extra := config.get("num_nextn_predict_layers"):
        config["num_hidden_layers"] -= extra


def _granite(header: GGUFHeader, config: Config) -> None:
    names = {
        "logit_scale": "logits_scaling",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
    }
    config |= {name: value for key, name in names.items() if (value := header.get(key)) is not None}


def _granite_hybrid(header: GGUFHeader, config: Config) -> None:
    _granite(header, config)
    HYBRIDS["granitemoehybrid"](header, config)


def _cohere(header: GGUFHeader, config: Config) -> None:
    config["logit_scale"] = header.get("logit_scale", 1.0)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors


_REFINEMENTS: dict[str, Callable[[GGUFHeader, Config], None]] = {
    **HYBRIDS,
    "llama": _llama,
    "qwen2": _qwen_bias,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "deepseek_v3": _mla,
    "glm_moe_dsa": _mla,
    "minicpm3": _mla,
    "glm4_moe": _nextn,
    "granite": _granite,
    "granitemoe": _granite,
    "granitemoehybrid": _granite_hybrid,
    "cohere": _cohere,
    "cohere2": _cohere,
}
