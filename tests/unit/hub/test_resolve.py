"""What a model's name may be, and what is said of one that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvarn import hub
from kvarn.core.errors import FetchError, ModelError, UnknownName
from kvarn.hub.names import short_name


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path / "home"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_short_names_are_whole() -> None:
    assert hub.default_name() in hub.short_names()
    for name in hub.short_names():
        known = short_name(name)
        assert len(known.sha256) == 64
        assert known.size_bytes > 0
        assert known.parts


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    found = hub.resolve(str(path))
    assert (found.kind, found.path, found.weights, found.size_bytes) == ("gguf", path, (path,), 24)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip"])
def test_not_a_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        hub.resolve(str(tmp_path / "a.gguf"))


def test_directory_with_one_file(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"12345678")
    found = hub.resolve(str(directory))
    assert (found.kind, found.path, found.size_bytes) == ("hf", directory, 8)


def test_directory_with_shards(directory: Path) -> None:
    index = {"weight_map": {"a": "x-2.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "x-1.safetensors").write_bytes(b"1")
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files: x-2\.safetensors"):
        hub.resolve(str(directory))
    (directory / "x-2.safetensors").write_bytes(b"22")
    found = hub.resolve(str(directory))
    assert [path.name for path in found.weights] == ["x-1.safetensors", "x-2.safetensors"]
    assert found.size_bytes == 3


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"weight_map": 3}'])
def test_directory_with_a_broken_index(directory: Path, text: str) -> None:
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="is not a safetensors index"):
        hub.resolve(str(directory))


def test_directory_without_weights(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        hub.resolve(str(directory))


def test_directory_of_ggufs_names_them(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"no config\.json.*b\.gguf"):
        hub.resolve(str(tmp_path))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        hub.resolve(str(tmp_path / "gone.gguf"))


def test_misspelt_short_name() -> None:
    with pytest.raises(UnknownName, match="did you mean: smollm2-135m"):
        hub.resolve("smolm2-135m")


def test_offline_and_not_fetched() -> None:
    with pytest.raises(FetchError, match="smollm2-135m has not been fetched") as caught:
        hub.resolve("smollm2-135m", fetch=False)
    assert caught.value.fixes == ("kvarn pull smollm2-135m",)


def test_a_path_goes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"1")
    (tmp_path / "org").mkdir()
    directory.rename(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/name").path == tmp_path / "org" / "name"
