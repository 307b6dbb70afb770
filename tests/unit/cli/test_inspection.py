"""`kvarn inspect`: the factors multiply to the bytes, and the bytes are those of the files."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvarn.cli._frame import run
from kvarn.cli._inspection import group_cost, inspect_model, safetensors_bytes
from kvarn.core.errors import ModelError
from kvarn.core.formats import format_names, parse_kv_format
from kvarn.core.specs import GroupSpec, LayerSpec
from kvarn.hub import resolve

CONFIG = {
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "vocab_size": 100,
    "max_position_embeddings": 32,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16)}, tmp_path / "model.safetensors")
    return tmp_path


def test_windows_layers_and_weights(directory: Path) -> None:
    found = inspect_model(resolve(str(directory)), None, 32)
    told = found.as_dict()
    assert told["layers"] == {"total": 4, "by_kind": {"attention": 2, "attention, window 8": 2}}
    assert told["kv"]["bytes_per_token"] == 4 * 2 * 2 * 16 * 2
    assert told["kv"]["bytes_at_max_context"] == 2 * (2 * 2 * 16 * 2) * 32 + 2 * (2 * 2 * 16 * 2) * 8
    assert told["weights"] == {"bytes": 74, "by_type": {"F32": 60, "F16": 14}}


def factors_of(text: str) -> float:
    product, _, total = text.partition(" = ")
    numbers = [float(re.search(r"[\d.]+", factor)[0]) for factor in product.split(" x ")]
    assert total
    return prod(numbers)


@pytest.mark.parametrize("name", format_names())
def test_written_factors_multiply_to_the_bytes(name: str) -> None:
    group = GroupSpec((0, 1, 2), LayerSpec(kv_heads=2, k_dim=64, v_dim=64, query_heads=8))
    cost = group_cost(group, parse_kv_format(name), 32)
    # Widths of quantized formats are printed with six digits.
    assert factors_of(cost.factors) == pytest.approx(cost.bytes_per_token, rel=1e-5)
    block = parse_kv_format(name).block_bytes(64, 64, 32)
    assert cost.bytes_per_token * 32 == block * 2 * 3


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (LayerSpec(kv_heads=4, k_dim=8, v_dim=8, query_heads=4), "MHA"),
        (LayerSpec(kv_heads=2, k_dim=8, v_dim=8, query_heads=4), "GQA, 4 query heads over 2"),
        (LayerSpec(kv_heads=1, k_dim=8, v_dim=8, query_heads=4), "MQA"),
        (LayerSpec(latent_dim=512, rope_dim=64, query_heads=16), "MLA"),
    ],
)
def test_attention_by_name(spec: LayerSpec, said: str) -> None:
    assert group_cost(GroupSpec((0,), spec), parse_kv_format("bfloat16"), 32).attention.startswith(said)


def test_latent_is_counted_once() -> None:
    group = GroupSpec((0, 1), LayerSpec(latent_dim=512, rope_dim=64, query_heads=128))
    assert group_cost(group, parse_kv_format("bfloat16"), 32).bytes_per_token == 2 * 576 * 2


def test_text_and_json_of_the_command(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "2 layers x 2 KV heads x 2 (K and V) x 16 head dim x 2 bytes = 256 bytes a token" in text
    assert run(["inspect", str(directory), "--json", "--kv", "float32"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"]["bytes_per_token"] == 1024


@pytest.mark.parametrize(
    "content", [b"", b"1234", b"\x05" + bytes(7) + b"[1,2]", b"\xff" * 64, b"\x02" + bytes(7) + b"{"]
)
def test_broken_safetensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        safetensors_bytes(tmp_path / "x")


def test_split_gguf_names_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00003.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 are missing: m-00001-of-00003\.gguf, m-00003"):
        resolve(str(path))
