"""A term of a device's memory, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Certainty = Literal["exact", "estimated", "unknown"]


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a device's memory. low, high: the range of an estimate, equal to bytes where exact. how: in words."""

    name: str
    bytes: int
    certainty: Certainty
    low: int
    high: int
    how: str = ""


def exact(name: str, nbytes: int, how: str = "") -> Term:
    return Term(name, nbytes, "exact", nbytes, nbytes, how)


def estimated(name: str, low: int, high: int, how: str, central: int | None = None) -> Term:
    return Term(name, (low + high) // 2 if central is None else central, "estimated", low, high, how)
