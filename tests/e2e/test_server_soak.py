"""The soak of scripts/soak, for a minute."""

from __future__ import annotations

import pytest

from support.soaking import soak


@pytest.mark.slow
def test_a_minute_of_random_load() -> None:
    report = soak(60)
    assert report.good, str(report)
    assert report.preemptions > 0, "the pool was not too small"
    assert report.clients.outcomes["200"] > 100 and report.clients.outcomes["left"] > 20
