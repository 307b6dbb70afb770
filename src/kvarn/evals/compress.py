"""Prompt compression: drop what the model itself could have guessed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvarn.core.errors import InvalidRequest
from kvarn.engine.llm import LLM
from kvarn.evals.scoring import Scorer
from kvarn.text import Tokenizer

CLOSING = r"[\"'”’)\]]*"
SENTENCE_END = re.compile(rf"[.!?]{CLOSING}(?=\s)|(?<!\n)(?=\n)")
PHRASE_END = re.compile(rf"[,;:]{CLOSING}(?=\s)|[—–]")
PHRASE_WORDS = 4


@dataclass(frozen=True, slots=True)
class Compressed:
    """text: what is left. tokens: counted by the model's tokenizer, before and after."""

    text: str
    tokens_before: int
    tokens_after: int

    @property
    def ratio(self) -> float:
        """What is left, as a share."""
        return self.tokens_after / self.tokens_before if self.tokens_before else 1.0


@dataclass(frozen=True, slots=True)
class Phrase:
    """A piece of the text that is kept or dropped whole. sentence: its index. kept: whatever it says."""

    text: str
    ids: tuple[int, ...]
    sentence: int
    kept: bool


def compress(text: str, ratio: float, llm: LLM | str | None = None, *, question: str | None = None) -> Compressed:
    """Shorten `text` to at most `ratio` of its tokens, where what must stay allows it.

    Selective Context (Li et al. 2023, arXiv 2310.06201): a unit's worth is the mean self-information -log2 p(token |
    text before it) of its tokens under the model. Here whole sentences go first, least informative first, as long as
    more than the target is left; then phrases, cut at punctuation and every PHRASE_WORDS words (the paper takes noun
    phrases from a parser). Always kept: sentences that end in a question mark, the last sentence, and `question`,
    where it stands in the text. llm: a loaded model or a name; None: the default model. Raises InvalidRequest.
    """
    if not 0 < ratio <= 1:
        raise InvalidRequest(f"a compression to {ratio:g} of the text", fixes=("use a share in (0, 1]",))
    if not text.strip():
        raise InvalidRequest("there is no text to compress", fixes=("give some text",))
    loaded = llm if isinstance(llm, LLM) else LLM(llm)
    before = len(loaded.tokenizer.encode(text, add_special=False))
    if ratio == 1:
        return Compressed(text, before, before)
    phrases = _phrases(loaded.tokenizer, text.strip(), question)
    left = "".join(p.text for p in _chosen(phrases, _information(loaded, phrases), ratio * before)).strip()
    return Compressed(left, before, len(loaded.tokenizer.encode(left, add_special=False)))


def _phrases(tokenizer: Tokenizer, text: str, question: str | None) -> list[Phrase]:
    """The whole text in pieces, each with the white space before it."""
    sentences = _pieces(text, SENTENCE_END)
    found: list[Phrase] = []
    for index, sentence in enumerate(sentences):
        asks = sentence.rstrip().endswith("?") or index == len(sentences) - 1
        fixed = asks or (question is not None and sentence.strip() in question)
        for clause in _pieces(sentence, PHRASE_END):
            words = re.findall(r"\s*\S+", clause)
            for at in range(0, len(words), PHRASE_WORDS):
                piece = "".join(words[at : at + PHRASE_WORDS])
                found.append(Phrase(piece, tuple(tokenizer.encode(piece, add_special=False)), index, fixed))
    return found


def _pieces(text: str, end: re.Pattern[str]) -> list[str]:
    """`text` cut after each match; joined, it is the text again."""
    cuts = [0, *(m.end() for m in end.finditer(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(cuts) if text[a:b].strip()]


def _information(llm: LLM, phrases: Sequence[Phrase]) -> list[float]:
    """Each phrase's self-information in bits, summed over its tokens. A text longer than the context is read in parts;
    a part's first token counts as its average one."""
    ids = [token for p in phrases for token in p.ids]
    size = max(2, llm.plan.context_tokens - 1)
    scorer, bits = Scorer(llm.engine), []
    for at in range(0, len(ids), size):
        part = ids[at : at + size]
        mine = (-scorer.score(part[:1], part[1:]).logprobs / math.log(2)).tolist() if len(part) > 1 else [0.0]
        bits += [sum(mine) / len(mine), *mine][: len(part)]
    llm.engine.cache.reset_peak()  # what is reported later is the answer's
    found, at = [], 0
    for phrase in phrases:
        found.append(sum(bits[at : at + len(phrase.ids)]))
        at += len(phrase.ids)
    return found


def _chosen(phrases: Sequence[Phrase], bits: Sequence[float], target_tokens: float) -> list[Phrase]:
    """Drop sentences while more than the target would be left, then phrases down to it."""
    left, gone = float(sum(len(p.ids) for p in phrases)), set[int]()
    sentences: dict[int, list[int]] = {}
    for index, phrase in enumerate(phrases):
        if not phrase.kept:
            sentences.setdefault(phrase.sentence, []).append(index)
    units = _by_worth(sentences.values(), phrases, bits)
    for unit in units:
        size = sum(len(phrases[i].ids) for i in unit)
        if left - size >= target_tokens:
            gone.update(unit)
            left -= size
    rest = [[i] for unit in units for i in unit if i not in gone]
    for (index,) in _by_worth(rest, phrases, bits):
        if left <= target_tokens:
            break
        gone.add(index)
        left -= len(phrases[index].ids)
    return [p for i, p in enumerate(phrases) if i not in gone]


def _by_worth(units: Iterable[list[int]], phrases: Sequence[Phrase], bits: Sequence[float]) -> list[list[int]]:
    """Units of phrase indices, those of the fewest bits a token first."""

    def worth(unit: list[int]) -> float:
        return sum(bits[i] for i in unit) / max(1, sum(len(phrases[i].ids) for i in unit))

    return sorted(units, key=worth)
