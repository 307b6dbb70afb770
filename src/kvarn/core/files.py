"""A model's files on disk, and the directory in which Kvarn keeps what it fetches and converts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from platformdirs import user_cache_path

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model found on disk.

    name: as it was asked for. kind: 'gguf' (path is the file) or 'hf' (path is a directory with config.json).
    weights: the files that hold tensors, in order; empty if only the config was fetched. size_bytes: their sum.
    """

    kind: Literal["gguf", "hf"]
    name: str
    path: Path
    weights: tuple[Path, ...]
    size_bytes: int

    @classmethod
    def of(cls, kind: Literal["gguf", "hf"], name: str, path: Path, weights: tuple[Path, ...]) -> ModelFiles:
        """Absolute paths and the sum of the weight files' sizes."""
        files = tuple(file.absolute() for file in weights)
        return cls(kind, name, path.absolute(), files, sum(file.stat().st_size for file in files))


def kvarn_home() -> Path:
    """Where fetched models and converted tokenizers live: KVARN_HOME, or the platform's cache directory."""
    asked = os.environ.get("KVARN_HOME")
    return Path(asked).expanduser().absolute() if asked else user_cache_path("kvarn")


@contextmanager
def atomic_write(target: Path) -> Iterator[BinaryIO]:
    """Write `target` whole or not at all: a temporary file beside it, synced and renamed when the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its files are for the owner's eyes only, and these may be shared.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        with partial.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def fingerprint(path: Path) -> str:
    """Identity of a file as far as it shows without reading it: absolute path, size and time of change."""
    stat = path.stat()
    return f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
