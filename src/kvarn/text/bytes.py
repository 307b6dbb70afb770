"""The bytes that each token stands for. Text is put together from bytes, so that a character split over several tokens
is whole or not there, and never a replacement character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from kvarn.core.errors import ModelError

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_alphabet() -> tuple[str, ...]:
    """GPT-2's printable character for each byte: printable Latin-1 bytes stand for themselves, the others are moved
    to U+0100 and up in order (Radford et al. 2019, encoder.py)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(moved)) for byte in range(256))


BYTE_TO_CHAR = _byte_alphabet()
_CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; one that uses other characters stands for itself."""
    try:
        return bytes(_CHAR_TO_BYTE[char] for char in token)
    except KeyError:
        return token.encode("utf-8")


def sentencepiece_bytes(token: str, space: str = "▁") -> bytes:
    """Bytes of a sentencepiece token: `<0x0A>` is one byte, `▁` a space."""
    if found := _BYTE_TOKEN.match(token):
        return bytes((int(found[1], 16),))
    return token.replace(space, " ").encode("utf-8")


class TokenBytes:
    """Token id -> bytes, made when asked for. strips_space: text decoded from its start loses one leading space."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ModelError if the tokenizer's decoder is neither byte-level nor sentencepiece-like."""
        self._tokenizer = tokenizer
        self._added = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}
        self._spell, self.strips_space = _spelling(tokenizer)

    def __call__(self, token_id: int) -> bytes:
        """b'' for an id that the vocabulary does not have (models pad their embedding)."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._make(token_id)
        return found

    def _make(self, token_id: int) -> bytes:
        if (content := self._added.get(token_id)) is not None:
            # Sentencepiece spells an added run of spaces with its own mark; byte-level added tokens are plain text.
            return self._spell(content) if self._spell is sentencepiece_bytes else content.encode("utf-8")
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._spell(token)


def _spelling(tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return byte_level_bytes, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return sentencepiece_bytes, "Strip" in kinds or any(
            step.get("prepend_scheme") in ("first", "always") for step in steps
        )
    raise ModelError(f"the tokenizer's decoder ({', '.join(kinds) or 'none'}) is neither byte-level nor sentencepiece")


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
