"""Constraints: what may come next, and when an answer is complete."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvarn.server.errors import ApiError
from kvarn.server.guided import GuideMaker, MatcherGuide
from kvarn.server.schema.common import ResponseFormat, StructuredOutputs
from support.models import EOS, VOCAB, byte_tokenizer

WORDS = byte_tokenizer()


@pytest.fixture(scope="module")
def maker() -> GuideMaker:
    return GuideMaker(WORDS, VOCAB)


def structured(maker: GuideMaker, **wanted: Any) -> MatcherGuide:
    guide = maker.make(None, StructuredOutputs.model_validate(wanted))
    assert isinstance(guide, MatcherGuide)
    return guide


def follow(guide: MatcherGuide, text: str) -> bool:
    """Whether the text may be written, byte by byte."""
    for token in WORDS.encode(text, add_special=False):
        mask = guide.allowed()
        if mask is None or not mask[token]:
            return False
        guide.accept(token)
    return guide.error is None


def test_nothing_is_constrained(maker: GuideMaker) -> None:
    assert maker.make(None, None) is None
    assert maker.make(ResponseFormat(type="text"), None) is None


@pytest.mark.parametrize("text", ["ab", "aab", "aaab", "b", "ba", "c", ""])
def test_regex_allows_exactly_its_texts(maker: GuideMaker, text: str) -> None:
    guide = structured(maker, regex="a+b")
    whole = follow(guide, text) and guide.done
    assert whole == bool(re.fullmatch("a+b", text))


def test_end_is_allowed_where_the_grammar_accepts(maker: GuideMaker) -> None:
    guide = structured(maker, regex="ab*")
    assert not guide.allowed()[EOS]
    assert follow(guide, "a")
    assert guide.allowed()[EOS]
    assert not guide.done


def test_choice_is_literal(maker: GuideMaker) -> None:
    assert follow(structured(maker, choice=["a.c", "x"]), "a.c")
    assert not follow(structured(maker, choice=["a.c", "x"]), "abc")


def test_schema(maker: GuideMaker) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    assert follow(structured(maker, json=schema), json.dumps({"n": 12}))
    assert not follow(structured(maker, json=schema), '{"n": "x"}')
    asked = ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    guide = maker.make(asked, None)
    assert isinstance(guide, MatcherGuide)
    assert follow(guide, '{"n": 1}')


def test_forks_go_their_own_ways(maker: GuideMaker) -> None:
    guide = structured(maker, regex="ab|cd")
    left, right = guide.fork(), guide.fork()
    assert follow(left, "ab")
    assert follow(right, "cd")
    assert left.done and right.done and not guide.done


def test_a_forbidden_token_is_an_error_of_this_answer_only(maker: GuideMaker) -> None:
    guide = structured(maker, regex="ab")
    other = guide.fork()
    guide.accept(ord("x"))
    assert guide.error is not None and guide.error.startswith("constraint: ")
    assert guide.allowed() is None
    assert other.error is None


@pytest.mark.parametrize(
    ("response_format", "outputs", "why"),
    [
        (None, {"regex": "("}, "does not compile"),
        (None, {}, "names 0 constraints"),
        (None, {"regex": "a", "choice": ["b"]}, "names 2 constraints"),
        (None, {"grammar": "start: nope"}, "does not compile"),
        (None, {"json": {"type": "nonsense"}}, "does not compile"),
        ({"type": "json_schema"}, None, "schema is missing"),
        ({"type": "regex"}, None, "regex is missing"),
        ({"type": "json_object"}, {"regex": "a"}, "use one"),
    ],
)
def test_bad_constraints(maker: GuideMaker, response_format: Any, outputs: Any, why: str) -> None:
    wanted = ResponseFormat.model_validate(response_format) if response_format else None
    also = StructuredOutputs.model_validate(outputs) if outputs is not None else None
    with pytest.raises(ApiError, match=why):
        maker.make(wanted, also)
