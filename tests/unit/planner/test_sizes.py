"""Sizes and token counts as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarn.core.errors import InvalidRequest
from kvarn.planner.sizes import MAX_TOKENS, parse_size, parse_tokens, show_both, show_bytes, show_seconds, show_tokens


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("512MiB", 2**29),
        ("1_000", 1000),
        ("4,096 B", 4096),
        (77, 77),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["24G", "24k", "", "GiB", "-1GiB", "0", "0GiB", "1e9", "9EiB", "99999999TiB", "1.2.3GB"]
)
def test_sizes_that_mean_nothing(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "tokens"), [("4096", 4096), ("128k", 131072), ("128K", 131072), ("1M", 2**20), (5, 5)]
)
def test_tokens(text: str | int, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["0", "-5", "1.3", "128kb", "many", "2000000m", 0, -1])
def test_tokens_that_mean_nothing(text: str | int) -> None:
    with pytest.raises(InvalidRequest):
        parse_tokens(text)


@given(st.integers(1, 2**62))
def test_bytes_round_trip(nbytes: int) -> None:
    assert parse_size(f"{nbytes}") == parse_size(f"{nbytes:,} B") == nbytes
    shown = parse_size(show_bytes(nbytes).replace(" ", ""))
    assert abs(shown - nbytes) <= max(1, 0.006 * nbytes)


@given(st.integers(1, 2**30))
def test_whole_binary_sizes_round_trip_exactly(mib: int) -> None:
    assert parse_size(f"{mib}MiB") == mib * 2**20


@given(st.integers(1, MAX_TOKENS))
def test_tokens_round_trip(tokens: int) -> None:
    assert parse_tokens(show_tokens(tokens).split(" (")[0].replace(",", "")) == tokens
    if tokens * 1024 <= MAX_TOKENS:
        assert parse_tokens(f"{tokens}k") == tokens * 1024


def test_both_units_are_labelled() -> None:
    assert show_both(2**30) == "1.00 GiB = 1.07 GB"
    assert show_both(5) == "5 B"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "12.3 ms"), (2.5, "2.5 s"), (3e-6, "3 us"), (5000.0, "5,000 s")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text
