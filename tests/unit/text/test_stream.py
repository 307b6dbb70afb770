"""Text streams: whole characters, and nothing of a stop string."""

from __future__ import annotations

import pytest

from kvarn.text.stream import TextStream, text_of

WORDS = {1: b"Hello", 2: b" wor", 3: b"ld", 4: "é".encode()[:1], 5: "é".encode()[1:], 6: b"\xff", 7: b"<end>", 8: b"!"}


def words(token_id: int) -> bytes:
    return WORDS.get(token_id, b"")


def test_a_split_character_waits_for_its_rest() -> None:
    stream = TextStream(words)
    assert [stream.push([1]), stream.push([4]), stream.push([5]), stream.finish()] == ["Hello", "", "é", ""]


def test_a_character_that_never_gets_whole_is_left_out() -> None:
    assert text_of(words, [1, 4]) == "Hello"


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert text_of(words, [1, 6, 3]) == "Hello\ufffdld"


def test_skipped_ids_give_no_text() -> None:
    assert text_of(words, [7, 1, 7], skip=[7]) == "Hello"


def test_stop_over_several_tokens() -> None:
    stream = TextStream(words, stops=["o world"])
    assert [stream.push([1]), stream.push([2]), stream.push([3])] == ["Hell", "", ""]
    assert stream.stopped_by == "o world"
    assert (stream.push([8]), stream.finish()) == ("", "")


def test_what_only_looked_like_a_stop_comes_out() -> None:
    stream = TextStream(words, stops=["o world peace"])
    assert [stream.push([1]), stream.push([2]), stream.push([8])] == ["Hell", "", "o wor!"]
    assert stream.stopped_by is None


def test_held_text_comes_out_at_the_end() -> None:
    stream = TextStream(words, stops=["o!!"])
    assert stream.push([1]) + stream.push([8]) == "Hell"
    assert stream.finish() == "o!"


@pytest.mark.parametrize(
    ("stops", "text", "by"),
    [
        (["lo", "l"], "He", "l"),  # the one that is whole first
        (["ello", "lo"], "H", "ello"),  # of two that end together, the longest
        (["orl", "wo"], "Hello ", "wo"),
    ],
)
def test_which_stop_wins(stops: list[str], text: str, by: str) -> None:
    stream = TextStream(words, stops=stops)
    assert stream.push([1, 2, 3]) + stream.finish() == text
    assert stream.stopped_by == by
