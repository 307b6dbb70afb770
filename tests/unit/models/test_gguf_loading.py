"""GGUF files of every tensor type and architecture, written here and read by Kvarn, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from kvarn.core.errors import ConfigError, ModelError, UnknownArchitecture, UnknownName
from kvarn.core.gguf_header import read_gguf_header
from kvarn.models.loading import load_model
from kvarn.models.loading.gguf import GGUFSource
from kvarn.models.weights._ggml import FLOATS, QUANTIZED
from support.gguf_writing import write_gguf
from support.list_of_blocks import ListOfBlocks, run

TINY = {
    "vocab_size": 61,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(32)],
    "long_factor": [1.0 + i for i in range(32)],
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 5, "query_pre_attn_scalar": 32}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 32, "sliding_window": 5, "num_hidden_layers": 7, "query_pre_attn_scalar": 32},
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, longrope": (
        "phi3",
        {"original_max_position_embeddings": 16, "max_position_embeddings": 128, "rope_parameters": LONGROPE},
    ),
}
IDS = torch.randint(3, 61, (23,), generator=torch.Generator().manual_seed(2))


def random_model(model_type: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def our_logits(path: Path, weights: str = "float32") -> torch.Tensor:
    model = load_model(path, weights)
    return run(model, ListOfBlocks(model, 1, len(IDS)), [(0, IDS)], {0: len(IDS)})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_reads_as_it_was_written(name: str, tmp_path: Path) -> None:
    model_type, settings = ARCHITECTURES[name]
    model = random_model(model_type, **settings)
    write_gguf(model, tmp_path / "model.gguf")
    with torch.inference_mode():
        expected = model(IDS[None]).logits[0]
    assert expected.std() > 0.05
    assert (our_logits(tmp_path / "model.gguf") - expected).abs().max() < 1e-4


@pytest.mark.parametrize("type_name", [*FLOATS, *sorted(QUANTIZED)])
def test_every_tensor_type_equals_transformers(type_name: str, tmp_path: Path) -> None:
    model = random_model("llama", tie_word_embeddings=type_name.endswith("_0"))
    write_gguf(model, tmp_path / "model.gguf", type_name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = theirs(IDS[None]).logits[0]
    assert expected.std() > 0.01
    assert (our_logits(tmp_path / "model.gguf") - expected).abs().max() < 1e-4


@pytest.mark.parametrize("type_name", sorted(QUANTIZED))
def test_raw_blocks_decode_to_what_is_read(type_name: str, tmp_path: Path) -> None:
    """Blocks as the file has them, rows in Hugging Face's order: nothing is lost on the way to an integer product."""
    write_gguf(random_model("llama"), tmp_path / "model.gguf", type_name)
    source = GGUFSource([read_gguf_header(tmp_path / "model.gguf")], 4, 2)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        name = f"model.layers.1.{part}.weight"
        raw, shape = source.raw(name), source.shape(name)
        assert raw is not None and shape is not None and raw.type == type_name
        read = torch.empty(shape)
        source.read(name, read)
        decoded = gguf.quants.dequantize(raw.data.numpy(), gguf.GGMLQuantizationType[type_name])
        assert np.array_equal(decoded, read.numpy())
    assert source.raw("model.norm.weight") is None


def test_native_and_bfloat16_are_the_numbers_rounded_or_their_codes(tmp_path: Path) -> None:
    write_gguf(random_model("llama"), tmp_path / "model.gguf", "Q8_0")
    exact = our_logits(tmp_path / "model.gguf")
    rounded, codes = (our_logits(tmp_path / "model.gguf", kind) for kind in ("bfloat16", "native"))
    for found in (rounded, codes):
        assert 0 < (exact - found).abs().max() < 0.05 * exact.abs().max()
    assert not torch.equal(rounded, codes)


def test_missing_tensors_are_all_named(tmp_path: Path) -> None:
    gone = ("blk.1.attn_k.weight", "blk.0.ffn_norm.weight", "output_norm.weight")
    write_gguf(random_model("llama"), tmp_path / "model.gguf", leave_out=gone)
    with pytest.raises(ModelError, match="3 of 21") as raised:
        load_model(tmp_path / "model.gguf")
    for name in ("layers.1.self_attn.k_proj", "layers.0.post_attention_layernorm", "model.norm"):
        assert f"{name}.weight" in str(raised.value)


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    model = random_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data = torch.zeros(128, 256)
    write_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight is \(128, 256\), should be \(256, 256\)"):
        load_model(tmp_path / "model.gguf")


def test_an_unsupported_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(random_model("llama"), path, "Q4_0")
    _patch_type(path, "blk.0.attn_v.weight", gguf.GGMLQuantizationType.IQ4_NL)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_v\.weight has type IQ4_NL"):
        load_model(path)


def _patch_type(path: Path, name: str, kind: int) -> None:
    """Change a tensor's type in the file's header (Q4_0 and IQ4_NL blocks are of one size)."""
    data = bytearray(path.read_bytes())
    at = data.index(name.encode()) + len(name) + 4 + 2 * 8  # after the number of dimensions and both of them
    assert int.from_bytes(data[at : at + 4], "little") == gguf.GGMLQuantizationType.Q4_0
    data[at : at + 4] = int(kind).to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize("keep_bytes", [2, 40, 4000, -1])
def test_a_truncated_file_is_refused(keep_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(random_model("llama"), path)
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ConfigError, match=r"truncated|not a GGUF"):
        load_model(path)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(ConfigError, match="not a GGUF"):
        load_model(tmp_path / "model.gguf")


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "falcon")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_vocab_size(8)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnknownArchitecture, match="falcon") as raised:
        load_model(tmp_path / "model.gguf")
    for known in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"):
        assert known in str(raised.value)


def test_an_unknown_weight_kind_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="bfloat16"):
        load_model(tmp_path / "model.gguf", "bfloat17")
