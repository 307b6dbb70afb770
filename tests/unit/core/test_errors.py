"""What an error says."""

from __future__ import annotations

from kvarn.core.errors import LISTED_NAMES, UnknownName


def test_an_unknown_name_offers_the_nearest_once() -> None:
    assert str(UnknownName("KV format", "int5", ["int4", "int4", "float32"])).endswith("did you mean: int4")


def test_names_that_are_not_listed_are_counted() -> None:
    names = [f"name{n}" for n in range(LISTED_NAMES + 3)]
    message = str(UnknownName("device", "zzz", names))
    assert names[LISTED_NAMES - 1] in message
    assert names[LISTED_NAMES] not in message
    assert message.endswith("and 3 more")
    assert "more" not in str(UnknownName("device", "zzz", names[:LISTED_NAMES]))
