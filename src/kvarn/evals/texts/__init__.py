"""Texts in the public domain that ship with Kvarn: see README.md."""

from __future__ import annotations

from importlib.resources import files

DEFAULT = "moby_dick.txt"


def shipped_text(name: str = DEFAULT) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
