"""Keys and tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn.core.errors import InvalidRequest
from kvarn.server.tenants import Tenants, load_tenants

TWO = """
[tenants.acme]
keys = ["sk-a", "sk-b"]
priority = 3
[tenants.other]
keys = ["sk-c"]
admin = true
max_requests = 2
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text, "utf-8")
    return path


def test_everybody_without_keys() -> None:
    tenants = Tenants()
    assert not tenants.keys_needed
    anyone = tenants.of(None)
    assert anyone is not None
    assert (anyone.namespace, anyone.admin) == (b"", True)


def test_keys_name_their_tenant(tmp_path: Path) -> None:
    tenants = load_tenants(write(tmp_path, TWO))
    a, b, c = (tenants.of(f"Bearer sk-{k}") for k in "abc")
    assert a is b
    assert a is not None and c is not None
    assert (a.name, a.priority, a.admin, a.max_requests) == ("acme", 3, False, None)
    assert (c.name, c.priority, c.admin, c.max_requests) == ("other", 0, True, 2)
    assert a.namespace != c.namespace
    assert len(a.namespace) == 32


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer sk-x", "Basic sk-a", "sk-a", "Bearer \udcff"]
)
def test_wrong_keys(tmp_path: Path, header: str | None) -> None:
    assert load_tenants(write(tmp_path, TWO)).of(header) is None


def test_salts_differ_between_two_starts(tmp_path: Path) -> None:
    path = write(tmp_path, TWO)
    first, second = (load_tenants(path).of("Bearer sk-a") for _ in range(2))
    assert first is not None and second is not None
    assert first.namespace != second.namespace


def test_sharing_has_no_salt(tmp_path: Path) -> None:
    path = write(tmp_path, TWO + "share_prefixes = true\n")
    acme, other = (load_tenants(path).of(f"Bearer sk-{k}") for k in "ac")
    assert acme is not None and other is not None
    assert (bool(acme.namespace), other.namespace) == (True, b"")
    everybody = load_tenants(path, share_prefixes=True).of("Bearer sk-a")
    assert everybody is not None
    assert everybody.namespace == b""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names no tenant"),
        ("tenants = 3", "names no tenant"),
        ("[tenants", "keys.toml"),
        ("[tenants.a]\nkeys = []", "has no keys"),
        ("[tenants.a]\nkeys = [3]", "has no keys"),
        ("[tenants]\na = 3", "has int"),
        ("[tenants.a]\nkeys = ['x']\nfoo = 1", "has foo"),
        ("[tenants.a]\nkeys = ['x']\nmax_requests = 0", "whole numbers"),
        ("[tenants.a]\nkeys = ['x']\n[tenants.b]\nkeys = ['x']", "another one has"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        load_tenants(write(tmp_path, text))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        load_tenants(tmp_path / "none.toml")
