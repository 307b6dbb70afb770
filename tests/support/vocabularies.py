"""Small real vocabularies, and GGUF files that hold them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from gguf import GGUFWriter
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it? We'll see; they've 1,234 reasons.",
    "def add(a, b):\n    return a + b  # 42\n\n\nfor i in range(10):\n\tprint(add(i, 1))\n",
    "Ärger über Öl, naïve café, señor. Привет, мир! Как дела сегодня? مرحبا بالعالم नमस्ते दुनिया",
    "日本語のテキストと漢字。한국어 문장입니다. 🎉 👩‍👩‍👧 emoji 🇸🇪  two  spaces   three",
] * 4
TEXTS = [
    "Hello world",
    "  two  spaces   three ",
    "It's we'LL don't, 1234567 and 3.14",
    "日本語 한국어 Привет नमस्ते مرحبا",
    "🎉🇸🇪👩‍👩‍👧‍👦 e\u0301 é \u200b\ufffd",
    "x\n\n\n\ty\r\n  z\n",
    "def f(x):\n    return x**2\n",
    "<|end|>a<|end|> <tool>b",
    "",
]


def train_byte_level(pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer, **model: Any) -> tokenizers.Tokenizer:
    """A byte-level BPE of 600 tokens with one control token, `<|end|>` (id 0)."""
    tokenizer = tokenizers.Tokenizer(BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(alphabet), special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def train_sentencepiece(prefix: Path, *, dummy_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    """A sentencepiece BPE of 600 pieces with byte fallback, <unk> <s> </s> and a user-defined <tool>."""
    corpus = prefix.with_suffix(".txt")
    corpus.write_text("\n".join(CORPUS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.Train(
        input=str(corpus),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        user_defined_symbols=["<tool>"],
        add_dummy_prefix=dummy_prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(prefix.with_suffix(".model")))


def write_byte_level(path: Path, tokenizer: tokenizers.Tokenizer, pre: str, **more: Any) -> Path:
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    types = [3 if token == "<|end|>" else 1 for token in tokens]
    return _write(path, "llama", "gpt2", tokens, types, merges=merges, pre=pre, **{"eos_id": 0, **more})


def write_sentencepiece(
    path: Path, processor: sentencepiece.SentencePieceProcessor, *, architecture: str = "llama", **more: Any
) -> Path:
    ids = range(processor.GetPieceSize())
    return _write(
        path,
        architecture,
        "llama",
        [processor.IdToPiece(i) for i in ids],
        [_type(processor, i) for i in ids],
        scores=[processor.GetScore(i) for i in ids],
        **{"bos_id": processor.bos_id(), "eos_id": processor.eos_id(), **more},
    )


def _type(processor: sentencepiece.SentencePieceProcessor, index: int) -> int:
    if processor.IsUnknown(index):
        return 2
    if processor.IsControl(index):
        return 3
    if processor.IsByte(index):
        return 6
    return 4 if processor.IdToPiece(index) == "<tool>" else 1


def _write(
    path: Path,
    architecture: str,
    kind: str,
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    pre: str | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    space_prefix: bool | None = None,
    add_bos: bool | None = None,
    template: str | None = None,
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    for value, add in (
        (merges, writer.add_token_merges),
        (scores, writer.add_token_scores),
        (pre, writer.add_tokenizer_pre),
        (bos_id, writer.add_bos_token_id),
        (eos_id, writer.add_eos_token_id),
        (space_prefix, writer.add_add_space_prefix),
        (add_bos, writer.add_add_bos_token),
        (template, writer.add_chat_template),
    ):
        if value is not None:
            add(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
