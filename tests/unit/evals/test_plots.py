"""What the pictures show of an error."""

from __future__ import annotations

import pytest

from kvarn.evals.plots import pictures
from kvarn.evals.records import Row

pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")


def rows(cache: str, ppl: float, rate: float, error: float, fingerprint: str = "together") -> list[Row]:
    speed = Row(cache, "speed", "decode_tokens_per_s", rate, 7, 2.5, rate, "m", 0, 32, {}, fingerprint, 1, 0.5)
    return [speed, Row(cache, "ppl", "perplexity", ppl, 7, 2.5, rate, "m", 0, 9, {}, cache, 1, error, (1.0, 2.0))]


def bars(axes: object) -> dict[str, tuple[float | None, float | None]]:
    """By choice: half the length of its bars along both axes; None: no bar."""
    found: dict[str, tuple[float | None, float | None]] = {}
    for container in axes.containers:  # pyright: ignore[reportAttributeAccessIssue]
        lines = iter(container.lines[2])
        halves: list[float | None] = []
        for along, has in ((0, container.has_xerr), (1, container.has_yerr)):
            ends = next(lines).get_segments()[0][:, along] if has else None
            halves.append(None if ends is None else float(ends[1] - ends[0]) / 2)
        found[container.get_label()] = halves[0], halves[1]
    return found


def test_errors_are_bars() -> None:
    """The full cache has none: the others' are of their difference to it. One that stands at the edge has none."""
    found = rows("full", 20.0, 10.0, 3.0) + rows("int4", 20.2, 12.0, 0.1) + rows("int2", 60.0, 12.0, 5.0)
    drawn = {name: bars(figure.axes[0]) for name, figure in pictures(found, None).items()}
    assert drawn["memory"] == {
        "full": (None, None),
        "int4": (None, pytest.approx(0.1)),
        "int2": (None, None),
    }
    assert drawn["speed"]["int4"] == (pytest.approx(0.5), pytest.approx(0.1))
    assert drawn["speed"]["full"] == (pytest.approx(0.5), None)


def test_a_speed_of_another_hour_is_not_drawn() -> None:
    found = rows("full", 20.0, 10.0, 3.0) + rows("int4", 20.2, 12.0, 0.1, "another")
    figures = pictures(found, None)
    assert set(bars(figures["speed"].axes[0])) == {"full"}
    assert set(bars(figures["memory"].axes[0])) == {"full", "int4"}
