"""A block's identity: SHA-256 over a canonical serialisation of everything its contents depend on.

The chain starts at a root, which covers what all blocks of an identity share; each block's key covers its parent's key
and its own tokens, and so all tokens before it. Every field is tagged and carries its length, so that no two different
lists of fields serialise alike; roots and blocks start with different domains.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Digest = Callable[[bytes], bytes]

ROOT_DOMAIN = b"kvarn.prefix.root.v1"
BLOCK_DOMAIN = b"kvarn.prefix.block.v1"


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class Identity:
    """What all blocks of a chain share. model: the fingerprint of the weights and of how they are computed; kv_format
    and policy with their parameters; adapter: '' for none; salt: the tenant's, or what tenants share by agreement."""

    model: str
    block_size: int
    kv_format: str
    policy: str = ""
    adapter: str = ""
    salt: bytes = b""

    def root_key(self, digest: Digest = sha256) -> bytes:
        fields = (
            (b"model", self.model.encode()),
            (b"block_size", struct.pack("<q", self.block_size)),
            (b"kv_format", self.kv_format.encode()),
            (b"policy", self.policy.encode()),
            (b"adapter", self.adapter.encode()),
            (b"salt", self.salt),
        )
        return digest(_serialise(ROOT_DOMAIN, fields))


def block_key(parent_key: bytes, token_ids: Sequence[int], digest: Digest = sha256) -> bytes:
    """The key of the block that holds token_ids (each in 64 bits) and follows the block with parent_key."""
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return digest(_serialise(BLOCK_DOMAIN, ((b"parent", parent_key), (b"tokens", tokens))))


def _serialise(domain: bytes, fields: Sequence[tuple[bytes, bytes]]) -> bytes:
    parts = [struct.pack("<q", len(domain)), domain]
    for tag, value in fields:
        parts += (struct.pack("<q", len(tag)), tag, struct.pack("<q", len(value)), value)
    return b"".join(parts)
