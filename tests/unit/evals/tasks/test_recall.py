"""Where the answers of recall stand: spread over the text, whatever the seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvarn.evals.tasks._questions import Question
from kvarn.evals.tasks.base import Settings
from kvarn.evals.tasks.recall import _each, depths, key_value, tracking
from kvarn.text import Tokenizer
from support.models import byte_tokenizer

PROSE = "The sea was calm. Nobody spoke.\nA bird went by. " * 40
LENGTH = 4000


def test_depths_go_over_the_text_evenly_and_come_again() -> None:
    assert depths(2) == [0.25, 0.75]
    assert depths(16) == depths(8) * 2
    assert depths(8) == [(i + 0.5) / 8 for i in range(8)]


@pytest.mark.parametrize("make", [key_value, tracking])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_answer_stands_at_its_depth(
    make: Callable[[Tokenizer, Settings, int, float, random.Random], Question], seed: int
) -> None:
    tokenizer = byte_tokenizer()
    settings = Settings(text=PROSE, lengths=(LENGTH,), cases=8, seed=seed)
    questions = list(_each(tokenizer, settings, make))
    assert [q.detail["depth"] for q in questions] == depths(8)
    for q in questions:
        assert len(q.context) + len(q.question) + len(q.answer) == LENGTH
        context, answer = tokenizer.decode(list(q.context)), tokenizer.decode(list(q.answer)).strip()
        assert context.count(answer) == 1
        assert context.index(answer) / len(context) == pytest.approx(q.detail["depth"], abs=0.04)
