"""How byte-level vocabularies cut text before merging, by the names that GGUF files give (`tokenizer.ggml.pre`).

The patterns are those of the models' own tokenizer.json files (Llama 3, Qwen 2, Mistral's tekken, GPT-4o, DeepSeek V3);
the names are those of llama.cpp's convert_hf_to_gguf.py. A name that is not here is refused: another model's split
gives wrong ids without a sign of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from kvarn.core.errors import ModelError

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

_LLAMA3 = "|".join((_ENDINGS, _WORD, r"\p{N}{1,3}", _MARKS, _SPACES))
_QWEN2 = "|".join((_ENDINGS, _WORD, r"\p{N}", _MARKS, _SPACES))
_QWEN35 = "|".join((_ENDINGS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES))
_TEKKEN = "|".join((*_CAMEL, r"\p{N}", _MARKS_SLASH, _SPACES))
_GPT4O = "|".join((*(f"{word}{_ENDINGS}?" for word in _CAMEL), r"\p{N}{1,3}", _MARKS_SLASH, _SPACES))
_ASCII_MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    rf"{_ASCII_MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)


@dataclass(frozen=True, slots=True)
class Split:
    """patterns: cut by each in turn. gpt2_words: then by GPT-2's own pattern. nfc: text is composed first.
    whole_words: a word that is in the vocabulary is taken without merging (`ignore_merges`)."""

    patterns: tuple[str, ...] = field(default=())
    gpt2_words: bool = False
    nfc: bool = False
    whole_words: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        steps: list[PreTokenizer] = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        return pre_tokenizers.Sequence(steps)


_BY_SPLIT: tuple[tuple[Split, tuple[str, ...]], ...] = (
    (Split(gpt2_words=True), ("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling")),
    (
        Split((r"\p{N}",), gpt2_words=True),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    (
        Split((_LLAMA3,), whole_words=True),
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "lfm2.5"),
    ),
    (Split((_LLAMA3,)), ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4")),
    (Split((_QWEN2,), nfc=True), ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "hunyuan", "solar-open")),
    (Split((_QWEN2,)), ("stablelm2",)),
    (Split((_QWEN35,), nfc=True), ("qwen35",)),
    (Split((_TEKKEN,), whole_words=True), ("tekken",)),
    (Split((_GPT4O,)), ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (Split(_DEEPSEEK3), ("deepseek-v3", "hunyuan-dense")),
)
SPLITS = {name: split for split, names in _BY_SPLIT for name in names}


def split_named(name: str) -> Split:
    """Raises ModelError for a split that is not known, with those that are."""
    if name not in SPLITS:
        raise ModelError(
            f"the GGUF names pre-tokenizer {name!r}, which is not implemented; known: {', '.join(sorted(SPLITS))}",
            fixes=("give the model's Hugging Face directory, which has tokenizer.json",),
        )
    return SPLITS[name]
