"""The soak of scripts/soak, for a minute."""

from __future__ import annotations

import pytest

from support.soak_clients import ClientReport
from support.soaking import GROWTH_BYTES, SoakReport, soak


@pytest.mark.slow
def test_a_minute_of_random_load() -> None:
    report = soak(60)
    assert report.good, str(report)
    assert report.preemptions > 0, "the pool was not too small"
    assert report.clients.outcomes["200"] > 100 and report.clients.outcomes["left"] > 20


FLAT = {"seconds": 60.0, "idle": True, "leaked_sequences": 0, "rss_warm": 300_000_000, "rss_end": 301_000_000}


@pytest.mark.parametrize(
    "wrong",
    [
        {"rss_end": FLAT["rss_warm"] + int(GROWTH_BYTES) + 1},
        {"rss_warm": 0},
        {"leaked_sequences": 1},
        {"ledger_error": "3 blocks are nobody's"},
        {"idle": False},
        {"clients": ClientReport(lost=1)},
        {"clients": ClientReport(unexpected=["status 500"])},
    ],
    ids=str,
)
def test_what_a_soak_does_not_let_pass(wrong: dict[str, object]) -> None:
    assert SoakReport(**FLAT).good and not SoakReport(**{**FLAT, **wrong}).good
