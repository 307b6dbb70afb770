"""The only place where numbers of the cache are touched. `load_backend` names the implementation that runs."""

from __future__ import annotations

from importlib import import_module

from kvarn.core.registry import names_in
from kvarn.kernels.api import Backend


def backend_names() -> tuple[str, ...]:
    """Backends are the folders of this package."""
    return tuple(n for n in names_in("kvarn.kernels") if n != "api")


def load_backend(name: str | None = None) -> Backend:
    """The backend called `name`; None: the reference."""
    return import_module(f"kvarn.kernels.{name or 'reference'}").BACKEND()
