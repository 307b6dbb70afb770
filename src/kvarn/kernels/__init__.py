"""The only place where numbers of the cache are touched. `load_backend` names the implementation that runs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from torch import Tensor

from kvarn.core.errors import IncompatiblePlan, UnknownName
from kvarn.core.registry import names_in
from kvarn.kernels._arena import Arena
from kvarn.kernels.api import Backend, CodeMatrix, Codes

_NATIVE_FIRST = ("cpu", "reference")


@dataclass(frozen=True, slots=True)
class BackendReport:
    """One backend found: does it load here, and why not, or what it runs on."""

    name: str
    available: bool
    detail: str


def backend_names() -> tuple[str, ...]:
    """Backends are the folders of this package."""
    return tuple(n for n in names_in("kvarn.kernels") if n != "api")


def load_backend(name: str | None = None) -> Backend:
    """The backend called `name`; None: the native one where it was built and this machine runs it, else the reference
    (`backend_report` says why). Raises UnknownName, and IncompatiblePlan for a named one that cannot be loaded."""
    if name is None:
        name = next(r.name for r in backend_report() if r.available)
    if name not in (known := backend_names()):
        raise UnknownName("backend", name, known)
    try:
        return import_module(f"kvarn.kernels.{name}").BACKEND()
    except ImportError as error:
        raise IncompatiblePlan(
            f"the {name} backend cannot be loaded: {error}",
            fixes=("--backend reference", "reinstall kvarn where a C++17 compiler is found"),
        ) from error


def code_matrix(held: Codes, width: int, bias: Tensor | None = None, arena: Arena | None = None) -> CodeMatrix:
    """A matrix of codes, in the native kernels' layout (and then laid into `arena`) where they were built, else as the
    reference holds it."""
    try:
        made = import_module("kvarn.kernels.cpu.matrix").Matrix
    except ImportError:
        return import_module("kvarn.kernels.reference.matrix").Matrix(held, width, bias)
    return made(held, width, bias, arena)


def backend_report() -> tuple[BackendReport, ...]:
    """Every backend found, the one that `load_backend(None)` takes first."""
    names = sorted(backend_names(), key=lambda n: _NATIVE_FIRST.index(n) if n in _NATIVE_FIRST else len(_NATIVE_FIRST))
    reports = tuple(_probe(n) for n in names)
    return tuple(sorted(reports, key=lambda r: not r.available))


def _probe(name: str) -> BackendReport:
    try:
        backend = import_module(f"kvarn.kernels.{name}").BACKEND
    except ImportError as error:
        return BackendReport(name, False, str(error))
    return BackendReport(name, True, backend.describe())
