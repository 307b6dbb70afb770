"""Writes tiny GGUF files from transformers models, as llama.cpp's converter would; used by the tests beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

K_QUANTS = {
    "Q2_K": (84, (80, 82)),
    "Q3_K": (110, (108,)),
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def write_gguf(
    model: Any, path: Path, type_name: str = "F32", leave_out: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Write `model` with every matrix as `type_name`; norms and biases stay F32. Returns the bytes written by name."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _metadata(writer, config)
    written: dict[str, np.ndarray] = {}
    for name, data in _tensors(model, architecture):
        if name in leave_out:
            continue
        kind = gguf.GGMLQuantizationType[type_name if data.ndim > 1 else "F32"]
        written[name] = _encode(data, kind, seed=len(written))
        writer.add_tensor(name, written[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    optional: dict[Callable[[Any], None], Any] = {
        writer.add_key_length: getattr(config, "head_dim", None),
        writer.add_value_length: getattr(config, "head_dim", None),
        writer.add_sliding_window: getattr(config, "sliding_window", None),
        writer.add_attn_logit_softcapping: getattr(config, "attn_logit_softcapping", None),
        writer.add_final_logit_softcapping: getattr(config, "final_logit_softcapping", None),
    }
    for add, value in optional.items():
        if value is not None:
            add(value)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        dim = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(dim * rope["partial_rotary_factor"]))
    # what transformers' own reader wants of a tokenizer
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    writer.add_token_merges(["< >"])


def _tensors(model: Any, architecture: str) -> list[tuple[str, np.ndarray]]:
    config, found = model.config, []
    kinds = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        data = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            data = _interleave(data, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            data = _interleave(data, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1.0
        found.append((names.get_name(name, (".weight", ".bias")), data))
    return found + _rope_tensors(config)


def _interleave(data: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def _rope_tensors(config: Any) -> list[tuple[str, np.ndarray]]:
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return [
            (f"rope_factors_{side}.weight", np.array(rope[f"{side}_factor"], np.float32)) for side in ("long", "short")
        ]
    if rope.get("rope_type") != "llama3":
        return []
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    return [("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))]


def _encode(data: np.ndarray, kind: gguf.GGMLQuantizationType, seed: int) -> np.ndarray:
    """The K types have no encoder in the gguf package: random blocks with small scales stand for quantized weights."""
    if kind.name not in K_QUANTS:
        return gguf.quants.quantize(data.astype(np.float32), kind)
    block_bytes, scales = K_QUANTS[kind.name]
    blocks = np.random.default_rng(seed).integers(0, 256, (data.size // 256, block_bytes), dtype=np.uint8)
    step = np.frombuffer(
        np.float16({"Q2_K": 2e-3, "Q3_K": 8e-4, "Q4_K": 1e-4, "Q5_K": 5e-5, "Q6_K": 2e-5}[kind.name]).tobytes(),
        np.uint8,
    )
    for at in scales:
        blocks[:, at : at + 2] = step
    return blocks.reshape(data.shape[0], -1)
