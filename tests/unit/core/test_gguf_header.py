"""The header reader against the gguf package's writer, and against damaged files."""

from __future__ import annotations

import contextlib
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvarn.core.gguf_header import (
    EAGER_ARRAY_LENGTH,
    GGML_TYPES,
    GGUFArray,
    GGUFError,
    read_gguf_header,
    shard_paths,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama file with every kind of metadata and a vocabulary long enough to be stepped over."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float64("llama.double", 0.1)
    writer.add_bool("llama.flag", True)
    writer.add_int64("llama.negative", -(2**40))
    writer.add_array("llama.short", [1, 2, 3])
    writer.add_array("llama.flags", [True, False])
    writer.add_array("llama.words", ["a", "Ġb", ""])
    n = EAGER_ARRAY_LENGTH + 5
    writer.add_token_list([f"t{i}" for i in range(n)])
    writer.add_token_scores([float(i) for i in range(n)])
    writer.add_string("llama.last", "after the arrays")
    writer.add_tensor("token_embd.weight", np.zeros((6, 32), np.float32))
    quantized = np.zeros((4, 34 * 2), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_of_every_kind(written: Path) -> None:
    header = read_gguf_header(written)
    assert header.architecture == "llama"
    assert header.get("block_count") == 2
    assert header.get("attention.layer_norm_rms_epsilon") == 1e-5, "the decimal that was meant, not its float32 noise"
    assert header.get("double") == 0.1
    assert header.get("flag") is True
    assert header.get("negative") == -(2**40)
    assert header.get("short") == (1, 2, 3)
    assert header.get("flags") == (True, False)
    assert header.get("words") == ("a", "Ġb", "")
    assert header.get("last") == "after the arrays"
    assert header.get("absent") is None


def test_long_arrays_are_read_only_when_asked(written: Path) -> None:
    header = read_gguf_header(written)
    kept = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(kept, GGUFArray)
    assert len(kept) == EAGER_ARRAY_LENGTH + 5
    tokens = header.array("tokenizer.ggml.tokens")
    assert (tokens[0], tokens[-1], len(tokens)) == ("t0", f"t{EAGER_ARRAY_LENGTH + 4}", len(kept))
    assert list(header.array("tokenizer.ggml.scores")[:3]) == [0.0, 1.0, 2.0]
    assert header.array("llama.short") == (1, 2, 3)
    with pytest.raises(KeyError):
        header.array("llama.absent")
    with pytest.raises(GGUFError, match="not an array"):
        header.array("llama.last")


def test_tensors_agree_with_the_gguf_package(written: Path) -> None:
    header, reader = read_gguf_header(written), gguf.GGUFReader(written)
    assert len(header.tensors) == len(reader.tensors)
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert ours.shape == tuple(int(d) for d in reversed(theirs.shape))
        assert (ours.type, ours.offset_bytes, ours.nbytes) == (
            theirs.tensor_type.name,
            theirs.data_offset,
            theirs.n_bytes,
        )
    assert header.bytes_by_type() == {"F32": 6 * 32 * 4, "Q8_0": 4 * 34 * 2}
    assert header.weight_bytes == sum(header.bytes_by_type().values())


def test_type_table_agrees_with_the_gguf_package() -> None:
    theirs = {int(t): (t.name, *sizes) for t, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    assert {code: entry for code, entry in GGML_TYPES.items() if code in theirs} == theirs


@pytest.mark.parametrize("kept", [0, 3, 4, 8, 23, 24, 60, 200, 1000])
def test_a_truncated_header_is_refused(written: Path, tmp_path: Path, kept: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(written.read_bytes()[:kept])
    with pytest.raises(GGUFError):
        read_gguf_header(cut, header_only_file=True)


def test_every_cut_inside_the_header_is_noticed(written: Path, tmp_path: Path) -> None:
    whole, header = written.read_bytes(), read_gguf_header(written)
    last = max(whole.find(name.encode()) + len(name) for name in header.tensors)
    cut = tmp_path / "cut.gguf"
    for kept in range(0, last, 997):
        cut.write_bytes(whole[:kept])
        with pytest.raises(GGUFError):
            read_gguf_header(cut, header_only_file=True)


def test_missing_tensor_data_is_noticed_unless_only_the_header_was_fetched(written: Path, tmp_path: Path) -> None:
    header = read_gguf_header(written)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(written.read_bytes()[: header.data_offset_bytes])
    with pytest.raises(GGUFError, match="truncated file"):
        read_gguf_header(cut)
    assert read_gguf_header(cut, header_only_file=True).tensors == header.tensors


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(60), "not a GGUF"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "absurd"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "absurd"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "name of"),
    ],
)
def test_what_is_no_gguf_is_refused_in_words(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=message):
        read_gguf_header(path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(4, 400), byte=st.integers(0, 255))
def test_a_changed_byte_never_crashes(written: Path, tmp_path: Path, position: int, byte: int) -> None:
    """Whatever the damage, the answer is a header or a GGUFError."""
    content = bytearray(written.read_bytes())
    content[position] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with contextlib.suppress(GGUFError):
        read_gguf_header(path)


def test_shards_are_found_or_missed_by_name(written: Path, tmp_path: Path) -> None:
    names = [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    for i, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_uint16("split.count", 3)
        writer.add_uint16("split.no", i)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    first = tmp_path / names[0]
    header = read_gguf_header(first)
    assert [p.name for p in shard_paths(first, header)] == names
    (tmp_path / names[1]).unlink()
    with pytest.raises(GGUFError, match="00002-of-00003"):
        shard_paths(first, header)
    assert shard_paths(written, read_gguf_header(written)) == (written,)


def test_a_header_needs_neither_torch_nor_numpy() -> None:
    """In a process of its own: what other tests imported would hide it."""
    import subprocess  # noqa: PLC0415

    code = (
        "import sys, kvarn.core.gguf_header, kvarn.core.gguf_config, kvarn.core.geometry as g; g.known_model_types();"
    )
    code += "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
