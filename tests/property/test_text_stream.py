"""Whatever the ids, the cuts between them and the stop strings: the pieces joined are the text, cut at the stop."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvarn.text.stream import TextStream, text_of

ALPHABET = "ab \né漢🎉"
pieces_of_text = st.lists(st.text(ALPHABET, min_size=1, max_size=8), max_size=8)
stop_strings = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


@st.composite
def byte_tokens(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A text and its UTF-8 bytes cut at random into tokens, also within characters."""
    raw = "".join(draw(pieces_of_text)).encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(raw)), max_size=12)) | {0, len(raw)})
    return raw.decode(), [raw[a:b] for a, b in itertools.pairwise(cuts)]


def first_stop(text: str, stops: list[str]) -> str:
    """The specification: the shortest beginning that ends with a stop string, without its longest such one."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ending))]
    return text


@given(byte_tokens(), stop_strings)
def test_joined_stream_is_the_text(case: tuple[str, list[bytes]], stops: list[str]) -> None:
    text, tokens = case
    stream = TextStream(tokens.__getitem__, stops=stops)
    pieces = [stream.push([index]) for index in range(len(tokens))]
    pieces.append(stream.finish())
    expected = first_stop(text, stops)
    assert "".join(pieces) == expected
    assert not any("\ufffd" in piece for piece in pieces)
    # What came out at any moment is certain: a beginning of the answer, with nothing of a stop string in it.
    for count in range(len(pieces) + 1):
        assert expected.startswith("".join(pieces[:count]))


@given(st.lists(st.binary(min_size=0, max_size=5), max_size=20), st.data())
def test_any_bytes_in_any_cuts_give_one_text(tokens: list[bytes], data: st.DataObject) -> None:
    whole = text_of(tokens.__getitem__, range(len(tokens)))
    stream, at, pieces = TextStream(tokens.__getitem__), 0, []
    while at < len(tokens):
        step = data.draw(st.integers(1, len(tokens) - at))
        pieces.append(stream.push(range(at, at + step)))
        at += step
    assert "".join(pieces) + stream.finish() == whole


@given(st.text(ALPHABET, max_size=40), st.text(ALPHABET, min_size=1, max_size=5))
def test_only_a_possible_beginning_of_a_stop_is_held(text: str, stop: str) -> None:
    stream = TextStream(lambda index: text[index].encode(), stops=[stop])
    out = ""
    for index in range(len(text)):
        out += stream.push([index])
        if stream.stopped_by is None:
            held = text[len(out) : index + 1]
            assert stop.startswith(held)
            assert len(held) < len(stop)
