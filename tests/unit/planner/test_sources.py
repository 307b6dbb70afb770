"""Geometries from files, directories, headers and names; damaged ones are refused in words."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvarn.core.errors import ConfigError, ModelError, UnknownName
from kvarn.planner.sources import load_geometry, model_names, stored_bytes

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def write_config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(CONFIG | changes))
    return path


def write_safetensors(path: Path, tensors: dict[str, tuple[str, int]]) -> None:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [nbytes], "data_offsets": [at, at + nbytes]}  # type: ignore[assignment]
        at += nbytes
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(at))


def test_a_config_file_and_its_directory(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    from_file, from_directory = load_geometry(str(path)), load_geometry(str(tmp_path))
    assert from_file.layers == from_directory.layers
    assert from_file.stored_weight_bytes is None
    assert str(path) in from_file.provenance


def test_weights_are_exact_from_safetensors_headers(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ("BF16", 200), "b": ("F32", 40)})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": ("BF16", 60)})
    found = load_geometry(str(tmp_path))
    assert found.weight_bytes == (("BF16", 260), ("F32", 40))
    assert found.stored_weight_bytes == 300


def test_weights_from_the_index_where_no_shard_is_here(tmp_path: Path) -> None:
    write_config(tmp_path)
    index = {"metadata": {"total_size": 123_456}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_bytes(tmp_path) == (("as indexed", 123_456),)
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F16", 10)})
    assert stored_bytes(tmp_path) == (("F16", 10),), "headers are exact by type and win over the index"


def test_a_gguf_gives_exact_weights_by_type(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_context_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tensor("token_embd.weight", np.zeros((100, 64), np.float16))
    writer.add_tensor("output_norm.weight", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = load_geometry(str(path))
    assert found.weight_bytes == (("F16", 12_800), ("F32", 256))
    assert found.layers[0].elements_per_token == 2 * 2 * 16
    assert load_geometry(str(tmp_path)).layers == found.layers, "a directory that holds one GGUF means it"
    cut = tmp_path / "cut" / "tiny.gguf"
    cut.parent.mkdir()
    cut.write_bytes(path.read_bytes()[:80])
    with pytest.raises(ConfigError, match="truncated"):
        load_geometry(str(cut))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1, 2]", "holds list"),
        ("[" * 100_000, "not JSON"),
        ("\xff", "num|not JSON"),
    ],
)
def test_malformed_configs_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        load_geometry(str(path))


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    for content in (b"", b"\xff" * 16, struct.pack("<Q", 4) + b"none", struct.pack("<Q", 20) + b'{"a": {"dtype": 1}} '):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError):
            load_geometry(str(tmp_path))


def test_empty_directories_and_missing_paths(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_geometry(str(tmp_path))
    with pytest.raises(ModelError, match="does not exist"):
        load_geometry(str(tmp_path / "absent.gguf"))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="2 GGUF files"):
        load_geometry(str(tmp_path))


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"llama-3\.1-8b"):
        load_geometry("lama-3.1-8b", fetch=False)
    with pytest.raises(UnknownName):
        load_geometry("no/such-model", fetch=False)


def test_names_need_no_network_and_are_complete() -> None:
    names = model_names()
    assert {"llama-3.1-8b", "smollm2-135m", "gpt-oss-20b"} <= set(names)
    assert len(names) == len(set(names))
    assert load_geometry("deepseek-r1", fetch=False).weight_format == "fp8"


def test_a_named_model_starts_light() -> None:
    """In a process of its own: no torch, transformers or NumPy, and soon done."""
    code = (
        "import sys; from kvarn.planner.sources import load_geometry;"
        "load_geometry('meta-llama/Llama-3.1-8B', fetch=False);"
        "import time; print([m for m in ('torch', 'transformers', 'numpy', 'huggingface_hub') if m in sys.modules],"
        " time.process_time())"
    )
    start = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("[] ")
    assert float(out.split()[-1]) < 0.5, "seconds of processor time"
    assert time.perf_counter() - start < 30
