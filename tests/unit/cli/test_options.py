"""Sizes, and the typed values that options become."""

from __future__ import annotations

import click
import pytest

from kvarn.cli._options import Bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("1000", 1000),
        ("1k", 1000),
        ("1KiB", 1024),
        ("1.5GB", 1_500_000_000),
        ("2gib", 2**31),
        ("2 GiB", 2**31),
        ("1T", 10**12),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert Bytes().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "1xb", "-1", "0", "1e999", "nan", "1 2", "0.1"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Bytes().convert(text, None, None)
