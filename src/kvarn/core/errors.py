"""Every exception Kvarn raises on purpose, in one tree.

A message gives the value, the limit and the way out; `fixes` holds the ways out as separate lines so that
the command line, the server and a test can each show them in their own way.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LISTED_NAMES = 20


class KvarnError(Exception):
    """Root of the tree. `message` is one line; `fixes` are things the caller can do, cheapest first."""

    exit_code = 2

    def __init__(self, message: str, *, fixes: Iterable[str] = ()) -> None:
        self.message = message
        self.fixes = tuple(fixes)
        super().__init__(message)

    def __str__(self) -> str:
        return self.message if not self.fixes else f"{self.message} (try: {'; '.join(self.fixes)})"


class InvalidRequest(KvarnError):
    """A request's own values are wrong: type, range, emptiness."""


class DoesNotFit(KvarnError):
    """A request or a plan needs more memory or context than there is, and waiting would not help."""


class IncompatiblePlan(KvarnError):
    """Two choices exclude each other; found before weights are loaded."""


class ModelError(KvarnError):
    """A model cannot be read: file, format, architecture, tensor, tokenizer."""


class UnknownArchitecture(ModelError):
    """The architecture is not implemented; names those that are."""


class ConfigError(ModelError):
    """A model's config is malformed, incomplete, or states cache geometry that Kvarn does not understand."""


class FetchError(KvarnError):
    """A model cannot be fetched: network, checksum, disk."""


class UnknownName(KvarnError):
    """A name of a plug-in, model or device is not known; offers the nearest known ones. `listed_by`: the command that
    lists all, for names that are too many for a line."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, listed_by: str = "") -> None:
        self.kind, self.name, self.known = kind, name, tuple(dict.fromkeys(known))
        near = difflib.get_close_matches(name, self.known, n=3, cutoff=0.5)
        listed = ", ".join(near or self.known[:LISTED_NAMES]) or "none"
        if not near and len(self.known) > LISTED_NAMES:
            listed += f" and {len(self.known) - LISTED_NAMES} more"
        lead = "did you mean" if near else "known"
        fixes = (listed_by,) if listed_by and not near else ()
        super().__init__(f"unknown {kind} {name!r}; {lead}: {listed}", fixes=fixes)
