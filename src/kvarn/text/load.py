"""Load a model's tokenizer, whichever way the model is stored."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from kvarn.core.files import ModelFiles, atomic_write, fingerprint, kvarn_home
from kvarn.core.gguf_header import GGUFHeader, read_gguf_header
from kvarn.text import gguf_vocab
from kvarn.text.hf import load_directory
from kvarn.text.tokenizer import Tokenizer, TokenizerSettings

# Change it when the conversion changes, so that older cached ones are not used.
CONVERSION = 1
# Tokens that end a turn by their name; GGUF files often state only one of the ids that end an answer.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model. A GGUF's is converted once and kept under KVARN_HOME. Raises ModelError."""
    if files.kind == "hf":
        return load_directory(files.path)
    header = read_gguf_header(files.path)
    backend = _converted(header)
    return Tokenizer(backend, gguf_settings(header, backend))


def _converted(header: GGUFHeader) -> tokenizers.Tokenizer:
    identity = f"{CONVERSION}:{tokenizers.__version__}:{fingerprint(header.path)}"
    kept = kvarn_home() / "tokenizers" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    if kept.is_file():
        with contextlib.suppress(Exception):  # the library raises bare Exception; a broken copy is made anew
            return tokenizers.Tokenizer.from_file(str(kept))
    backend = gguf_vocab.convert(header)
    with contextlib.suppress(OSError), atomic_write(kept) as out:  # a cache that cannot be written only costs time
        out.write(backend.to_str().encode("utf-8"))
    return backend


def gguf_settings(header: GGUFHeader, backend: tokenizers.Tokenizer) -> TokenizerSettings:
    """What the metadata states: special ids, whether to begin with bos, chat templates."""
    meta = header.metadata
    ids = {n: meta.get(f"tokenizer.ggml.{key}_token_id") for n, key in _TOKEN_KEYS.items()}
    spelled = {n: backend.id_to_token(i) for n, i in ids.items() if isinstance(i, int)}
    starts = meta.get("tokenizer.ggml.model") == "llama" or meta.get("tokenizer.ggml.pre") in ("llama-bpe", "tekken")
    return TokenizerSettings(
        bos_id=ids["bos_token"],
        add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", starts)),
        eos_id=ids["eos_token"],
        add_eos=bool(meta.get("tokenizer.ggml.add_eos_token", False)),
        end_ids=frozenset(_end_ids(meta, backend)),
        chat_templates=_templates(meta),
        tokens={n: token for n, token in spelled.items() if token is not None},
    )


_TOKEN_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _end_ids(meta: Mapping[str, Any], backend: tokenizers.Tokenizer) -> Iterator[int]:
    for key in ("eos", "eot", "eom"):
        if isinstance(found := meta.get(f"tokenizer.ggml.{key}_token_id"), int):
            yield found
    added = {token.content: index for index, token in backend.get_added_tokens_decoder().items()}
    yield from (added[token] for token in END_TOKENS if token in added)


def _templates(meta: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {key: value for key, value in meta.items() if key.startswith(prefix) and isinstance(value, str)}
    return {("default" if key == prefix else key.removeprefix(f"{prefix}.")): text for key, text in found.items()}
