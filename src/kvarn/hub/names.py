"""Short names of models, read from models.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from kvarn.core.errors import UnknownName


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel and the member of it that holds the file, or a part of it."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class ShortName:
    """A model that has a short name; `parts` joined in order are `file`, with this size and SHA-256."""

    name: str
    description: str
    file: str
    size_bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]


def _table() -> dict:
    return tomllib.loads(files("kvarn.hub").joinpath("models.toml").read_text(encoding="utf-8"))


def short_names() -> tuple[str, ...]:
    return tuple(_table()["models"])


def default_name() -> str:
    return _table()["default"]


def short_name(name: str) -> ShortName:
    """Raises UnknownName with the known short names."""
    models = _table()["models"]
    if name not in models:
        raise UnknownName("model", name, models)
    entry = models[name]
    return ShortName(name=name, **{**entry, "parts": tuple(WheelPart(**part) for part in entry["parts"])})
