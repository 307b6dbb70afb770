"""What is dropped of a prompt, and what never is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn import LLM, compress
from kvarn.core.errors import InvalidRequest
from kvarn.evals.compress import Phrase, _chosen, _phrases
from kvarn.evals.texts import shipped_text
from support.models import byte_tokenizer, write_model_directory

QUESTION = "What did the rabbit take out of its pocket?"
TEXT = shipped_text("alice.txt")[:700].rsplit(" ", 1)[0] + ".\n\n" + QUESTION


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Its context is shorter than the text, so the text is read in parts."""
    where: Path = write_model_directory(tmp_path_factory.mktemp("model"))
    return LLM(where, weights="float32", context_tokens=256)


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("ratio", [0.9, 0.5, 0.25])
def test_at_most_the_ratio_is_left_and_the_question_whole(llm: LLM, ratio: float) -> None:
    found = compress(TEXT, ratio, llm)
    assert found.tokens_before == len(TEXT.encode())
    assert found.tokens_after == len(found.text.encode()) <= ratio * found.tokens_before
    assert found.tokens_after > ratio * found.tokens_before - 60  # no more is dropped than must be
    assert found.text.endswith(QUESTION)
    left = iter(words(TEXT))
    assert all(word in left for word in words(found.text)), "words come from the text, in its order"


def test_a_ratio_of_one_changes_nothing(llm: LLM) -> None:
    assert compress(TEXT, 1, llm).text == TEXT


def test_what_must_stay_stays_even_above_the_ratio(llm: LLM) -> None:
    assert compress(TEXT, 0.01, llm).text == QUESTION
    named = compress(TEXT, 0.2, llm, question="Down the Rabbit-Hole")
    assert "Down the Rabbit-Hole" in named.text


@pytest.mark.parametrize("ratio", [0, -1, 1.5])
def test_a_ratio_that_means_nothing_is_refused(llm: LLM, ratio: float) -> None:
    with pytest.raises(InvalidRequest, match="compression"):
        compress(TEXT, ratio, llm)
    with pytest.raises(InvalidRequest, match="no text"):
        compress(" \n", 0.5, llm)


def test_pieces_joined_are_the_text() -> None:
    assert "".join(p.text for p in _phrases(byte_tokenizer(), TEXT, None)) == TEXT


def test_sentences_go_before_phrases_and_the_least_informative_first() -> None:
    def phrase(sentence: int, name: str, kept: bool = False) -> Phrase:
        return Phrase(name, (0,) * 10, sentence, kept)

    phrases = [phrase(0, "a"), phrase(0, "b"), phrase(1, "c"), phrase(1, "d"), phrase(2, "q", kept=True)]
    bits = [10.0, 50.0, 20.0, 25.0, 0.0]  # sentence 1 says less than sentence 0, phrase a least of all
    assert [p.text for p in _chosen(phrases, bits, 30)] == ["a", "b", "q"]
    assert [p.text for p in _chosen(phrases, bits, 20)] == ["b", "q"]
