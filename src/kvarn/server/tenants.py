"""Who asks: tenants by API key. A tenant's salt keeps its cached prompts apart from the others'."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.core.errors import InvalidRequest

_FIELDS = frozenset({"keys", "priority", "admin", "max_requests", "share_prefixes"})


@dataclass(frozen=True, slots=True)
class Tenant:
    """name: for fairness and logs. namespace: whose prefix blocks it may find. priority: of all its requests, added to
    a request's own. admin: sees every tenant's events. max_requests: at once (None: the server's limit)."""

    name: str
    namespace: bytes
    priority: int = 0
    admin: bool = False
    max_requests: int | None = None


class Tenants:
    """The tenants of a server. Without keys everybody is one tenant, who may do everything."""

    def __init__(self, by_key: Mapping[bytes, Tenant] | None = None) -> None:
        self._by_key = dict(by_key) if by_key is not None else None
        self._anyone = Tenant("", b"", admin=True)

    @property
    def keys_needed(self) -> bool:
        return self._by_key is not None

    def of(self, authorization: str | None) -> Tenant | None:
        """The tenant of an Authorization header; None where it is missing or wrong."""
        if self._by_key is None:
            return self._anyone
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            return None
        return self._by_key.get(_digest(key.strip()))


def _digest(key: str) -> bytes:
    """Keys are looked up by digest, so that the time of a look-up tells nothing of them."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def load_tenants(path: Path, share_prefixes: bool = False) -> Tenants:
    """Tenants of a TOML file: `[tenants.NAME]` with keys = ["..."] and, if wished, priority, admin, max_requests,
    share_prefixes. Raises InvalidRequest."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tenants")
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"API keys of {path}: {error}") from error
    if not isinstance(table, dict) or not table:
        raise InvalidRequest(
            f"{path} names no tenant", fixes=('write [tenants.NAME] with keys = ["..."]', "kvarn serve --help")
        )
    secret = secrets.token_bytes(32)
    found: dict[bytes, Tenant] = {}
    for name, entry in table.items():
        tenant, keys = _tenant(path, name, entry, secret, share_prefixes)
        for key in keys:
            if _digest(key) in found:
                raise InvalidRequest(f"{path}: tenant {name!r} uses a key that another one has")
            found[_digest(key)] = tenant
    return Tenants(found)


def _tenant(path: Path, name: str, entry: Any, secret: bytes, share: bool) -> tuple[Tenant, list[str]]:
    unknown = set(entry) - _FIELDS if isinstance(entry, dict) else {type(entry).__name__}
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        raise InvalidRequest(f"{path}: tenant {name!r} has {', '.join(sorted(unknown))}", fixes=(f"use {known}",))
    keys = entry.get("keys")
    if not isinstance(keys, list) or not keys or not all(isinstance(k, str) and k for k in keys):
        raise InvalidRequest(f"{path}: tenant {name!r} has no keys", fixes=('keys = ["..."]',))
    limit, priority = entry.get("max_requests"), entry.get("priority", 0)
    if not isinstance(priority, int) or not (limit is None or (isinstance(limit, int) and limit >= 1)):
        raise InvalidRequest(f"{path}: tenant {name!r}: priority and max_requests are whole numbers")
    shared = share or entry.get("share_prefixes") is True
    salt = b"" if shared else _salt(secret, keys)
    return Tenant(name, salt, priority, entry.get("admin") is True, limit), keys


def _salt(secret: bytes, keys: list[str]) -> bytes:
    """Derived from the tenant's keys and a secret of this process, so that nobody can name another tenant's blocks."""
    return hmac.digest(secret, "\0".join(sorted(keys)).encode("utf-8", "surrogateescape"), "sha256")
