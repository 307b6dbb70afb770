"""Models that are on the disk already: a GGUF file, or a directory as Hugging Face lays it out."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvarn.core.errors import ModelError
from kvarn.core.files import ModelFiles

GGUF_MAGIC = b"GGUF"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"^(.+)-(\d{5})-of-(\d{5})\.gguf$")


def open_local(name: str, path: Path) -> ModelFiles:
    """The model at `path`, which exists. Raises ModelError if it is neither a GGUF file nor a model directory."""
    return _directory(name, path) if path.is_dir() else _gguf(name, path)


def _gguf(name: str, path: Path) -> ModelFiles:
    try:
        with path.open("rb") as stream:
            magic = stream.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if magic != GGUF_MAGIC:
        raise ModelError(
            f"{path} is not a GGUF file (it starts with {magic!r}, not {GGUF_MAGIC!r})",
            fixes=("give a .gguf file, or the directory that holds config.json",),
        )
    shards = gguf_shards(path)
    return ModelFiles.of("gguf", name, shards[0], shards)


def gguf_shards(path: Path) -> tuple[Path, ...]:
    """All files of a split GGUF (`name-00002-of-00003.gguf`), or the one. Raises ModelError naming what lacks."""
    if not (parts := _SHARD.match(path.name)):
        return (path,)
    stem, count = parts[1], int(parts[3])
    shards = tuple(path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise ModelError(f"{path} is one of {count} files, and {len(missing)} are missing: {', '.join(missing[:4])}")
    return shards


def _directory(name: str, path: Path) -> ModelFiles:
    if not (path / "config.json").is_file():
        ggufs = sorted(found.name for found in path.glob("*.gguf"))
        held = f"; it holds {', '.join(ggufs)}" if ggufs else ""
        raise ModelError(
            f"{path} is no model directory: there is no config.json in it{held}",
            fixes=(f"give {path / ggufs[0]}",) if ggufs else ("give a directory with config.json and safetensors",),
        )
    return ModelFiles.of("hf", name, path, weight_files(path))


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory, by its index if there is one. Raises ModelError naming what lacks."""
    index = directory / INDEX
    if not index.is_file():
        found = tuple(sorted(directory.glob("*.safetensors")))
        if not found:
            raise ModelError(f"{directory} holds config.json but no .safetensors file")
        return found
    try:
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
    missing = [file for file in named if not (directory / file).is_file()]
    if missing:
        listed = ", ".join(missing[:4]) + (" ..." if len(missing) > 4 else "")
        raise ModelError(f"{directory} lacks {len(missing)} of {len(named)} weight files: {listed}")
    return tuple(directory / file for file in named)
