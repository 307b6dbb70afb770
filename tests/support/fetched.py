"""Models that `kvarn pull` has fetched; scripts/test does so first. Without them, tests are skipped by name."""

from __future__ import annotations

import pytest

from kvarn.core.errors import FetchError
from kvarn.core.files import ModelFiles
from kvarn.hub import resolve


def fetched(name: str) -> ModelFiles:
    """The model with the short name `name`, never over the network."""
    try:
        return resolve(name, fetch=False)
    except FetchError as error:
        pytest.skip(str(error))
