"""The tokenizer of a Hugging Face model directory: tokenizer.json and what the files beside it state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kvarn.core.errors import ModelError
from kvarn.text.tokenizer import Tokenizer, TokenizerSettings

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_directory(directory: Path) -> Tokenizer:
    """Raises ModelError: no tokenizer.json, or one that cannot be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json", fixes=("fetch it beside config.json (it is part of most models)",)
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    return Tokenizer(backend, settings_of(directory, backend))


def settings_of(directory: Path, backend: tokenizers.Tokenizer) -> TokenizerSettings:
    """What tokenizer_config.json, generation_config.json, config.json and chat_template.jinja state."""
    config = _read(directory / "tokenizer_config.json")
    special = _read(directory / "special_tokens_map.json")
    tokens = {n: text for n in _TOKENS if (text := _spelling(config.get(n, special.get(n)))) is not None}
    bos_id, eos_id = (_id(backend, tokens.get(n)) for n in ("bos_token", "eos_token"))
    begins, ends = _template_adds(backend, bos_id, eos_id)
    return TokenizerSettings(
        bos_id=bos_id,
        add_bos=_flag(config, "add_bos_token", begins),
        eos_id=eos_id,
        add_eos=_flag(config, "add_eos_token", ends),
        end_ids=frozenset(_end_ids(directory, eos_id)),
        chat_templates=_templates(directory, config),
        tokens=tokens,
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object")
    return found


def _spelling(token: Any) -> str | None:
    """A token is written as its text, or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _id(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _flag(config: Mapping[str, Any], name: str, otherwise: bool) -> bool:
    found = config.get(name)
    return found if isinstance(found, bool) else otherwise


def _template_adds(backend: tokenizers.Tokenizer, bos_id: int | None, eos_id: int | None) -> tuple[bool, bool]:
    """Whether the tokenizer's own post-processor begins with bos and ends with eos."""
    ids = backend.encode("a", add_special_tokens=True).ids
    return bool(ids) and ids[0] == bos_id, bool(ids) and ids[-1] == eos_id


def _end_ids(directory: Path, eos_id: int | None) -> Iterator[int]:
    if eos_id is not None:
        yield eos_id
    for name in ("generation_config.json", "config.json"):
        found = _read(directory / name).get("eos_token_id")
        yield from (i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int))


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    stated = config.get("chat_template") or _read(directory / "chat_template.json").get("chat_template")
    if isinstance(stated, str):
        return {"default": stated}
    named = stated if isinstance(stated, list) else []
    return {entry["name"]: entry["template"] for entry in named if {"name", "template"} <= set(entry)}
