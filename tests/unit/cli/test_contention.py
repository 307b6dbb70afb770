"""Threads while others use the cores too."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from kvarn.cli import _contention
from kvarn.cli._contention import Watch, advice, worthwhile_threads


@pytest.mark.parametrize(
    ("cores", "others", "threads"),
    [(2, 0.0, 2), (2, 0.4, 2), (2, 0.8, 1), (2, 7.0, 1), (1, 1.0, 1), (64, 10.2, 54)],
)
def test_threads_have_a_core_to_themselves(cores: int, others: float, threads: int) -> None:
    assert worthwhile_threads(cores, others) == threads


def test_what_the_process_does_itself_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of which all cores worked eight: five for this process."""
    clock = iter([100.0, 110.0])
    busy, own = iter([50.0, 58.0]), iter([1.0, 6.0])
    monkeypatch.setattr(_contention.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(_contention.time, "process_time", lambda: next(own))
    monkeypatch.setattr(_contention, "_busy_s", lambda: next(busy))
    assert Watch().others_cores() == pytest.approx(0.3)


def test_too_short_a_look_tells_nothing() -> None:
    assert Watch().others_cores() == 0.0


def test_advice_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_contention, "usable_cores", lambda: 2)
    watch = Watch()
    monkeypatch.setattr(Watch, "others_cores", lambda self: 1.2)
    assert advice(watch) == (
        1,
        "others keep 1.2 of 2 cores busy: running on 1 thread, as more would wait for each other (--threads 2 insists)",
    )
    monkeypatch.setattr(Watch, "others_cores", lambda self: 0.1)
    assert advice(watch) is None


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_process_beside_this_one_is_seen() -> None:
    watch = Watch()
    other = multiprocessing.get_context("spawn").Process(target=_spin, args=(1.5,))
    other.start()
    other.join()
    assert watch.others_cores() > 0.3
