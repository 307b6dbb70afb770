"""Questions and their answers as token ids."""

from __future__ import annotations

import random

import pytest

from kvarn.core.errors import InvalidRequest
from kvarn.evals.tasks._questions import answered, haystack, plain
from support.models import byte_tokenizer

TOKENIZER = byte_tokenizer()


def test_white_space_before_an_answer_belongs_to_the_question() -> None:
    question, answer = answered(TOKENIZER, "The key is", "  123")
    assert TOKENIZER.decode(answer) == "123"
    assert [*question, *answer] == plain(TOKENIZER, "The key is  123")
    assert answered(TOKENIZER, "The key is", "123")[1] == plain(TOKENIZER, "123")
    assert answered(TOKENIZER, "?", "  ")[1] == plain(TOKENIZER, " ")  # there is always something to score


def test_a_haystack_has_its_size_and_its_needles_in_order() -> None:
    text = "One sentence. Another one.\nAnd a third. " * 20
    needles = [(0.8, " LATE "), (0.0, " FIRST "), (0.4, " MIDDLE ")]
    ids = haystack(TOKENIZER, text, needles, 300, random.Random(1))
    found = TOKENIZER.decode(ids)
    assert len(ids) == 300
    places = [found.index(word) for word in (" FIRST ", " MIDDLE ", " LATE ")]
    assert places == sorted(places) and places[0] <= 1
    for place, depth in zip(places[1:], (0.4, 0.8), strict=True):
        assert abs(place / 300 - depth) < 0.25
        assert found[place - 1] in ".\n"
    with pytest.raises(InvalidRequest, match="no room"):
        haystack(TOKENIZER, text, needles, 10, random.Random(1))
