"""Fixtures for every test. Tiny models, dense references and watched engines are in `tests/support`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("kvarn", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("kvarn")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more threads, and sums keep one order."""
    if (torch := sys.modules.get("torch")) is None:  # no test that was collected needs it
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
