"""Which model it is, by content: results and verdicts hang on it, not on where the files lie."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvarn.core.files import MIB, ModelFiles


def model_identity(files: ModelFiles) -> str:
    """SHA-256, shortened to 32 hex digits, of each weight file's size, first and last MiB (header and tensors), and of
    config.json. Reads no more, so that it takes no time at each start."""
    digest = hashlib.sha256()
    for path in files.weights or (files.path,):
        digest.update(_ends(path))
    if files.path.is_dir() and (config := files.path / "config.json").is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()[:32]


def _ends(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as stream:
        first = stream.read(MIB)
        stream.seek(max(0, size - MIB))
        return b"%d" % size + first + stream.read(MIB)
