"""Hugging Face directories: one file or several, dtypes, and what is wrong with a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvarn.core.errors import ConfigError, ModelError, UnknownArchitecture
from kvarn.core.files import ModelFiles
from kvarn.models.loading import load_model
from support.list_of_blocks import ListOfBlocks, run

IDS = torch.arange(3, 20)


@pytest.fixture
def theirs() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


def logits_of(model: Any) -> torch.Tensor:
    return run(model, ListOfBlocks(model, 1, len(IDS)), [(0, IDS)])


def expected_of(theirs: Any) -> torch.Tensor:
    with torch.inference_mode():
        return theirs(IDS[None]).logits[0].float()


def test_shards_equal_one_file(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load_model(tmp_path / "one", "float32"), load_model(tmp_path / "many", "float32")
    assert torch.equal(logits_of(one), logits_of(many))
    assert (logits_of(one) - expected_of(theirs)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_read_exactly(dtype: torch.dtype, theirs: Any, tmp_path: Path) -> None:
    theirs.to(dtype).save_pretrained(tmp_path)
    ours = load_model(tmp_path, "float32")
    assert (logits_of(ours) - expected_of(theirs.float())).abs().max() < 1e-4


def test_model_files_are_accepted(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    files = ModelFiles.of("hf", "tiny", tmp_path, (tmp_path / "model.safetensors",))
    assert load_model(files, "float32").vocab_size == 64


def test_weights_of_a_model_that_sees(tmp_path: Path) -> None:
    """gemma3: the text model stands under text_config and language_model."""
    text = {
        "model_type": "gemma3_text",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 8,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**text)).eval()
    names = {f"language_model.{name}": tensor for name, tensor in model.state_dict().items() if "lm_head" not in name}
    save_file({name: tensor.contiguous() for name, tensor in names.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert (logits_of(load_model(tmp_path, "float32")) - expected_of(model)).abs().max() < 1e-4


def test_missing_tensors_are_all_named(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = ["model.norm.weight", "model.layers.2.mlp.gate_proj.weight", "lm_head.weight"]
    save_file({name: tensor for name, tensor in tensors.items() if name not in gone}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="3 of 30") as raised:
        load_model(tmp_path)
    assert all(name in str(raised.value) for name in gone)


def test_a_shape_that_the_config_denies_is_named(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 120}))
    with pytest.raises(ModelError, match=r"gate_proj\.weight is \(128, 64\), should be \(120, 64\)"):
        load_model(tmp_path)


def test_an_integer_tensor_is_named(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight has type I8"):
        load_model(tmp_path)


@pytest.mark.parametrize("keep_bytes", [0, 5, 1000, -100])
def test_a_truncated_file_is_refused(keep_bytes: int, theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(tmp_path)


def test_a_missing_shard_is_named(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (None, ModelError, "no config.json"),
        ("{", ConfigError, "not JSON"),
        ("[]", ConfigError, "model_type"),
        ('{"hidden_size": 4}', ConfigError, "model_type"),
        ('{"model_type": "warp_drive"}', UnknownArchitecture, "warp_drive"),
        ('{"model_type": "llama"}', ConfigError, "hidden_size"),
    ],
)
def test_a_config_that_is_not_one(text: str | None, error: type[Exception], said: str, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=said):
        load_model(tmp_path)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="no safetensors"):
        load_model(tmp_path)
