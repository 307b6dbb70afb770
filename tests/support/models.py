"""Tiny random models whose next token hangs on what they read, and a byte-level tokenizer: no file, no network."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvarn.models.base import CausalLM, load_architecture
from kvarn.models.build import Wanted
from kvarn.models.loading.load import build_model, load_kind
from kvarn.models.weights.base import RawBlocks
from kvarn.text import Tokenizer
from kvarn.text.bytes import BYTE_TO_CHAR
from kvarn.text.hf import load_directory
from kvarn.text.tokenizer import TokenizerSettings

BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
VOCAB = 260
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama", "num_hidden_layers": 2, "rope_theta": 1e4},
    # Layers 0 and 2 see a window of 6 tokens, which is no multiple of the tests' blocks; 1 and 3 see everything.
    "gemma3": {
        **BASE,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}


class RandomSource:
    """A tensor source of normal numbers, the same for a name whatever else is read."""

    norms_include_one = False

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int = 0, gain: float = 2.0) -> None:
        self.provenance, self._shapes, self._seed, self._gain = "random numbers", shapes, seed, gain

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self.tensor(name))

    def raw(self, name: str) -> RawBlocks | None:
        return None

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}:{name}".encode()))
        numbers = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return 1.0 + 0.1 * numbers
        return numbers if "embed" in name else numbers * self._gain / shape[-1] ** 0.5

    def tensors(self) -> dict[str, Tensor]:
        return {name: self.tensor(name) for name in self._shapes}


def random_source(config: Mapping[str, Any], seed: int = 0) -> RandomSource:
    wanted = Wanted()
    load_architecture(config["model_type"])(config, wanted)
    return RandomSource(wanted.shapes(), seed)


@cache
def tiny_model(name: str = "llama", seed: int = 0) -> CausalLM:
    """A model of CONFIGS in float32. Shared: nothing in it is ever written."""
    config = CONFIGS[name]
    return build_model(config, random_source(config, seed), load_kind("float32"))


def byte_backend() -> tokenizers.Tokenizer:
    """One token a byte, then the special ones."""
    vocab = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return backend


def byte_tokenizer(end_ids: Iterable[int] = (EOS,)) -> Tokenizer:
    settings = TokenizerSettings(
        bos_id=BOS, eos_id=EOS, end_ids=frozenset(end_ids), chat_templates={"default": CHAT_TEMPLATE}
    )
    return Tokenizer(byte_backend(), settings)


def write_model_directory(where: Path, name: str = "llama", seed: int = 0) -> Path:
    """The same model and tokenizer as files, as Hugging Face lays them out."""
    config = CONFIGS[name]
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(json.dumps({**config, "eos_token_id": EOS}), "utf-8")
    save_file(random_source(config, seed).tensors(), where / "model.safetensors")
    byte_backend().save(str(where / "tokenizer.json"))
    stated = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": CHAT_TEMPLATE}
    (where / "tokenizer_config.json").write_text(json.dumps(stated), "utf-8")
    load_directory(where)
    return where
