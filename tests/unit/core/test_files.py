"""Where Kvarn keeps its files, and writing them whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn.core.files import atomic_write, fingerprint, kvarn_home


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path))
    assert kvarn_home() == tmp_path
    monkeypatch.delenv("KVARN_HOME")
    assert kvarn_home().name == "kvarn"


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "sub" / "file"
    with atomic_write(target) as out:
        out.write(b"old")
    with pytest.raises(TypeError), atomic_write(target) as out:
        out.writelines([b"new", "no bytes"])  # pyright: ignore[reportArgumentType]
    assert target.read_bytes() == b"old"
    assert target.stat().st_mode & 0o777 == tmp_path.joinpath("sub").stat().st_mode & 0o666
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1")
    before = fingerprint(path)
    assert fingerprint(path) == before
    path.write_bytes(b"22")
    assert fingerprint(path) != before
