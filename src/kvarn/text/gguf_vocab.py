"""A tokenizer from a GGUF's vocabulary: byte-level BPE (`gpt2`) and sentencepiece BPE (`llama`).

The result is a Hugging Face `tokenizers.Tokenizer`, so what is cached is an ordinary tokenizer.json.
Metadata keys: the GGUF specification of ggml-org/ggml, docs/gguf.md, section "Tokenizer".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from kvarn.core.errors import ModelError
from kvarn.core.gguf_header import GGUFHeader
from kvarn.text.splits import split_named

SPACE = "▁"
# Architectures whose sentencepiece scores do not follow the merge order; the order in the file does.
MERGES_BY_POSITION = frozenset({"gemma", "gemma2", "gemma3", "gemma3n"})
# Architectures whose tokenizer writes a space before every piece of text, also one that starts with a space.
PREPEND_ALWAYS = frozenset({"phi3"})


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def convert(header: GGUFHeader) -> Tokenizer:
    """The tokenizer of a GGUF. Raises ModelError: no tokenizer in the file, or of a kind that is not known."""
    meta = header.metadata
    kind = meta.get("tokenizer.ggml.model")
    if kind is None or "tokenizer.ggml.tokens" not in meta:
        raise ModelError(
            f"{header.path.name} has no tokenizer in its metadata",
            fixes=("give the model's Hugging Face directory", "convert the model again with its tokenizer"),
        )
    builders: dict[str, Callable[[GGUFHeader, Sequence[str], Sequence[int]], Tokenizer]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
    }
    if kind not in builders:
        raise ModelError(
            f"{header.path.name}: tokenizer kind {kind!r} is not implemented; known: {', '.join(builders)}"
        )
    tokens = [str(token) for token in header.array("tokenizer.ggml.tokens")]
    return builders[kind](header, tokens, _types(header, len(tokens)))


def _types(header: GGUFHeader, count: int) -> list[int]:
    if "tokenizer.ggml.token_type" not in header.metadata:
        return [TokenType.NORMAL] * count
    types = [int(value) for value in header.array("tokenizer.ggml.token_type")]
    if len(types) != count:
        raise ModelError(f"{header.path.name}: {len(types)} token types for {count} tokens")
    return types


def _byte_level(header: GGUFHeader, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    if "tokenizer.ggml.merges" not in header.metadata:
        raise ModelError(f"{header.path.name}: a gpt2 vocabulary without tokenizer.ggml.merges")
    split = split_named(header.metadata.get("tokenizer.ggml.pre", "default"))
    merges = [_pair(str(merge)) for merge in header.array("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer, tokens, types)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(header: GGUFHeader, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    spelled = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(spelled)}
    merges = _sentencepiece_merges(header, spelled, types, vocabulary)
    unknown = spelled[header.metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    _space_handling(tokenizer, prefix, header.architecture in PREPEND_ALWAYS)
    return _with_added(tokenizer, spelled, types)


def _space_handling(tokenizer: Tokenizer, prefix: bool, always: bool) -> None:
    replace = normalizers.Replace(" ", SPACE)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix and always:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
    elif prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = replace
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)


def _sentencepiece_merges(
    header: GGUFHeader, tokens: Sequence[str], types: Sequence[int], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Sentencepiece stores no merges: it joins the neighbours whose joint token scores highest. The same order, as
    merges: every way to cut a token into two tokens, the best tokens first."""
    if "tokenizer.ggml.merges" in header.metadata:
        return [_pair(str(merge)) for merge in header.array("tokenizer.ggml.merges")]
    scores = _scores(header, len(tokens))
    joined = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    found = [
        (-scores[index], -cut, cut - len(token), index)
        for index, token in enumerate(tokens)
        if types[index] in joined
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    found.sort()
    return [(tokens[index][:-cut], tokens[index][-cut:]) for _, cut, _, index in found]


def _scores(header: GGUFHeader, count: int) -> Sequence[float]:
    if header.architecture in MERGES_BY_POSITION:
        return [-float(position) for position in range(count)]
    if "tokenizer.ggml.scores" not in header.metadata:
        raise ModelError(f"{header.path.name}: a sentencepiece vocabulary without tokenizer.ggml.scores")
    return [float(score) for score in header.array("tokenizer.ggml.scores")]


def _with_added(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Control tokens, and those the user defined, are found whole in the text before anything else is done to it."""
    for wanted, special in (((TokenType.CONTROL, TokenType.UNKNOWN), True), ((TokenType.USER_DEFINED,), False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in wanted and token.strip(SPACE)  # runs of spaces are found by merging, not in the raw text
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return tokenizer
