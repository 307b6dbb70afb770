"""File name = registered name. A plug-in is one file in a package that defines one agreed attribute."""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module
from typing import Any

from kvarn.core.errors import UnknownName

_NOT_PLUGINS = frozenset({"base"})


def names_in(package: str) -> tuple[str, ...]:
    """Names of the plug-ins in `package` (a dotted name), sorted. Imports the package, not the plug-ins."""
    path = import_module(package).__path__
    return tuple(sorted(m.name for m in pkgutil.iter_modules(path) if _is_plugin(m.name)))


def _is_plugin(name: str) -> bool:
    return name not in _NOT_PLUGINS and not name.startswith("_")


def load(package: str, name: str, attribute: str, kind: str) -> Any:
    """`package.name`'s `attribute`. Raises UnknownName with the known ones; a broken file shows its own traceback."""
    path = f"{package}.{name}"
    # Looking in the folder takes longer than what most callers do. Importing again waits for another thread's import.
    loaded = _is_plugin(name) and path in sys.modules
    if not loaded and name not in (known := names_in(package)):
        raise UnknownName(kind, name, known)
    return getattr(import_module(path), attribute)
