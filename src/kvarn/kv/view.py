"""What a model layer sees of the cache, and what a step is to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvarn.kernels.api import AttendParams, Backend, PlainStep, Rope


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step of a ragged batch, as the model sees it. T token rows.

    token_ids [T] int64; positions [T] int64, logical; kernels: the backend for the small fused operations.
    span_tokens [T] int64: the length that each row's sequence may reach (prompt and max_tokens); only models with
    `rope_by_length` (dynamic NTK, LongRoPE) look at it, and without it each row goes by its own position.
    read_rows [R] int64, ascending: the rows whose hidden states somebody reads, None for all; the last layer ends after
    its attention for the others."""

    token_ids: Tensor
    positions: Tensor
    kernels: Backend
    span_tokens: Tensor | None = None
    read_rows: Tensor | None = None


class LayerKV(Protocol):
    """One layer's cache in one step."""

    def append_and_attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, rope: Rope | None, params: AttendParams
    ) -> Tensor:
        """q [T, Hq, D], k [T, H, D], v [T, H, E], not yet rotated. Rotates q and k, appends k and v, attends.
        A layer that shares another's cache passes k = v = None. Returns [T, Hq, E] in q's dtype."""
        ...


class StepKV(Protocol):
    """The cache of one step, handed into the model's forward."""

    def layer(self, index: int) -> LayerKV:
        """The cache of model layer `index`."""
        ...

    def plain(self) -> PlainStep | None:
        """The step where layers only append and attend; None where something comes between, such as sealing, or
        signals that a policy reads."""
        ...
