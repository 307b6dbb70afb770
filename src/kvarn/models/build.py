"""From a file's tensors to a model's layers, in two passes over the same constructor.

First the architecture is built over `Wanted`, which only writes down what it asks for; that is compared with what the
file holds, so every missing or misshapen tensor is named before anything is read. Then all of it is read, a few tensors
at a time, and the architecture is built over `Loaded`. Each number is written once, where it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvarn.core.errors import ModelError
from kvarn.models.weights.base import (
    LinearSpec,
    Product,
    StepByStep,
    Table,
    TensorSource,
    WeightKind,
    WeightRoom,
    read_vector,
    total_bytes,
)


class Weights(Protocol):
    """What an architecture's constructor is handed."""

    activations: torch.dtype

    def linear(self, columns: int, *parts: tuple[str, int], bias: bool = False) -> Product:
        """One product of the named tensors one below the other: (name without `.weight`, output features) each."""
        ...

    def norm(self, name: str, size: int, plus_one: bool = False) -> Tensor:
        """A norm's weight [size] float32. plus_one: the model applies it as (1 + w)."""
        ...

    def table(self, name: str, rows: int, columns: int, tied: bool) -> Table:
        """An embedding [rows, columns]; tied: it is the output's matrix too."""
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything held."""
        ...

    def read_bytes(self) -> int:
        """What a step of a single token reads: all but an embedding that is not the output's matrix, and second forms
        of matrices that only steps of many tokens use."""
        ...


@dataclass
class Wanted:
    """The first pass: what is asked for, as data."""

    activations: torch.dtype = torch.float32
    linears: set[LinearSpec] = field(default_factory=set)
    norms: dict[str, tuple[int, bool]] = field(default_factory=dict)
    tables: dict[str, tuple[int, int, bool]] = field(default_factory=dict)

    def linear(self, columns: int, *parts: tuple[str, int], bias: bool = False) -> Product:
        self.linears.add(LinearSpec(parts, columns, bias))
        return _UNREAD

    def norm(self, name: str, size: int, plus_one: bool = False) -> Tensor:
        self.norms[name] = (size, plus_one)
        return torch.empty(0)

    def table(self, name: str, rows: int, columns: int, tied: bool) -> Table:
        self.tables[name] = (rows, columns, tied)
        return _UNREAD

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def read_bytes(self) -> int:
        return 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor asked for."""
        found: dict[str, tuple[int, ...]] = {name: (rows, columns) for name, (rows, columns, _) in self.tables.items()}
        found |= {name: (size,) for name, (size, _) in self.norms.items()}
        for spec in self.linears:
            for name, rows in spec.parts:
                found[f"{name}.weight"] = (rows, spec.columns)
                if spec.bias:
                    found[f"{name}.bias"] = (rows,)
        return found


class _Unread(StepByStep):
    """Stands where a product or table will stand; the first pass never computes."""

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("weights are not read yet")

    def rows(self, ids: Tensor) -> Tensor:
        raise AssertionError("weights are not read yet")

    def product(self) -> Product:
        return self

    def tensors(self) -> tuple[Tensor, ...]:
        return ()


_UNREAD = _Unread()


class Loaded:
    """The second pass: everything that `wanted` lists, read from `source` and packed by `kind`; second_bytes: see
    `WeightRoom`."""

    def __init__(self, wanted: Wanted, source: TensorSource, kind: WeightKind, second_bytes: int | None = None) -> None:
        self.activations, self._wanted = kind.activations, wanted
        self._ready: dict[Any, Any] = {}
        room = WeightRoom(second_bytes)
        linears = sorted(wanted.linears, key=lambda spec: -spec.rows * spec.columns)
        # Tables are the largest; read beside others, what is held only while packing would add up.
        for name, (rows, columns, tied) in wanted.tables.items():
            self._ready[name] = kind.table(name, (rows, columns), source, tied, room)
        jobs: dict[Any, Callable[[], Any]] = {}
        for spec in linears:
            jobs[spec] = lambda spec=spec: kind.linear(spec, source, room)
        for name, (size, plus_one) in wanted.norms.items():
            shift = 1.0 if plus_one and not source.norms_include_one else 0.0
            jobs[name] = lambda name=name, size=size, shift=shift: read_vector(name, size, source) + shift
        self._ready.update(_run(jobs))

    def linear(self, columns: int, *parts: tuple[str, int], bias: bool = False) -> Product:
        return self._ready[LinearSpec(parts, columns, bias)]

    def norm(self, name: str, size: int, plus_one: bool = False) -> Tensor:
        return self._ready[name]

    def table(self, name: str, rows: int, columns: int, tied: bool) -> Table:
        return self._ready[name]

    def tensors(self) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for ready in self._ready.values():
            found.extend((ready,) if isinstance(ready, Tensor) else ready.tensors())
        return tuple(found)

    def read_bytes(self) -> int:
        products = [self._ready[spec] for spec in self._wanted.linears]
        products += [self._ready[name].product() for name, (_, _, tied) in self._wanted.tables.items() if tied]
        return sum(p.read_bytes for p in products) + total_bytes([self._ready[name] for name in self._wanted.norms])


def _run(jobs: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Run every job, one after the other: side by side, what each holds only while it packs would add up to a peak that
    nobody could predict."""
    return {key: job() for key, job in jobs.items()}


def check(wanted: Wanted, source: TensorSource) -> None:
    """Raises ModelError naming every tensor that is missing or has another shape than the config says."""
    wanted_shapes = wanted.shapes()
    held = {name: source.shape(name) for name in wanted_shapes}
    if missing := [name for name, shape in held.items() if shape is None]:
        raise ModelError(
            f"{source.provenance}: {len(missing)} of {len(held)} tensors are missing: {_listed(missing)}",
            fixes=("fetch or convert the model again",),
        )
    wrong = [
        f"{name} is {held[name]}, should be {shape}" for name, shape in wanted_shapes.items() if held[name] != shape
    ]
    if wrong:
        raise ModelError(
            f"{source.provenance}: {len(wrong)} tensors do not fit the config: {_listed(wrong)}",
            fixes=("use the config that belongs to these weights",),
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
