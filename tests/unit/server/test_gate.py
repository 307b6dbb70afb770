"""What stands before the routes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarn.server.gate import json_depth


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


JSON = st.recursive(
    st.none() | st.text() | st.floats(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(JSON)
def test_depth_of_json(value: object) -> None:
    assert json_depth(json.dumps(value).encode()) == depth_of(value)


@pytest.mark.parametrize(
    ("body", "depth"),
    [(b"", 0), (b"[" * 1000, 1000), (b'"[[[[', 0), (rb'"\"[[[" [', 1), (b'["\\\\", [', 2), (b"}]", 0), (b"\xff[{", 2)],
)
def test_depth_of_what_is_no_json(body: bytes, depth: int) -> None:
    assert json_depth(body) == depth


@given(st.binary(max_size=200))
def test_any_bytes_have_a_depth(body: bytes) -> None:
    assert 0 <= json_depth(body) <= len(body)


def test_depth_of_many_quotes_is_linear() -> None:
    """An unterminated string full of escaped quotes must not be scanned again from each of them."""
    assert json_depth(b'"' + rb"\"" * 500_000) == 0
