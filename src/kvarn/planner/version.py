"""Engine versions as people and logs write them: '0.20.1', 'b4859', '2025-03', 'V0 (2024-12)', 'before #11309'."""

from __future__ import annotations

import re
from dataclasses import dataclass

_DATE = re.compile(r"\b(20\d\d)(?:-(\d\d))?\b")
_PULL = re.compile(r"\bbefore #(\d+)")
_NUMBERS = re.compile(r"(?<![#\w.-])[bv]?(\d+(?:\.\d+)*)(?![\dx])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Version:
    """numbers: release or build numbers, () if unstated. date: (year, month), None if unstated. before_pull: older than
    that pull request. Nothing stated: the latest."""

    text: str = ""
    numbers: tuple[int, ...] = ()
    date: tuple[int, int] | None = None
    before_pull: int | None = None

    def before(self, numbers: tuple[int, ...], date: tuple[int, int], pull: int | None = None) -> bool:
        """Whether this is older than the release `numbers`, which came out in `date` with pull request `pull`.
        Numbers decide where stated; an unstated version is the latest."""
        if pull is not None and self.before_pull is not None:
            return self.before_pull <= pull
        if len(self.numbers) >= min(2, len(numbers)):
            return self.numbers < numbers
        return self.date is not None and self.date < date


def parse_version(text: str | None) -> Version:
    """Never raises: what is not understood is the latest version. 'V0' (vLLM's first engine) is late 2024."""
    if not text:
        return Version()
    pull = _PULL.search(text)
    found = _DATE.search(text)
    date = (int(found[1]), int(found[2] or 12)) if found else None
    rest = _DATE.sub("", text)
    if re.search(r"\bV0\b", rest):
        return Version(text, (), date or (2024, 12))
    match = None if pull else _NUMBERS.search(rest)
    numbers = tuple(int(n) for n in match[1].split(".")) if match else ()
    return Version(text, numbers, date, int(pull[1]) if pull else None)
