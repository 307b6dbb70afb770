"""What queries to come are expected to look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvarn.core.errors import IncompatiblePlan
from kvarn.kernels.api import Rope
from kvarn.kv.policies.base import GroupView, ScoredPolicy, SequenceView, Signal


@dataclass(frozen=True)
class ExpectedAttention(ScoredPolicy):
    """Expected Attention (Devoto et al. 2025, arXiv 2510.00636, section 3): queries before their rotation are taken as
    Gaussian, N(mu, S); turned by the mean rotation of the next `future_tokens` positions, E[exp(q.k / sqrt(d))] is
    exp(mu.k / sqrt(d) + k'Sk / 2d). That, normalised over the keys but the sinks, times the norm of the value, is the
    score.

    Here: mu and S are those of all queries of the text so far but the sinks' (as in the authors' code), by query head;
    the heads that share a KV head are averaged. With `query_tokens` above 0 they are those of the last so many queries,
    turned back, which follows a text that changes its subject.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.VALUES, Signal.ROTATION})
    sinks: int = 4
    recent: int = 0
    query_tokens: int = field(default=0, kw_only=True)
    future_tokens: int = 512
    epsilon: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.future_tokens < 1 or not self.epsilon >= 0:
            raise IncompatiblePlan(
                f"future_tokens {self.future_tokens}, epsilon {self.epsilon}",
                fixes=("use 1 or more future_tokens, and an epsilon of 0 or more",),
            )

    @property
    def first_query(self) -> int:
        return self.sinks

    @property
    def signals(self) -> frozenset[Signal]:
        return self.needs | {Signal.RECENT_QUERIES if self.query_tokens else Signal.QUERY_MOMENTS}

    def scores(self, group: GroupView, view: SequenceView) -> np.ndarray:
        keys, held = group.keys(), torch.from_numpy(group.positions >= 0)
        keys = keys.masked_fill(~held[..., None], 0.0)
        judged = held & torch.from_numpy(group.positions >= self.sinks)
        logits = self._expected(group, view.length, keys).masked_fill(~judged[:, None], -torch.inf)
        weights = torch.softmax(logits, dim=-1).mean(1)  # over the heads of a KV head
        return ((weights + self.epsilon) * group.values().norm(dim=-1)).numpy()

    def _expected(self, group: GroupView, length: int, keys: Tensor) -> Tensor:
        """log E[exp(q.k / sqrt(d))] [R, G, S]. keys [R, S, D]."""
        assert group.turn is not None, "the model's rotation was asked for"
        dim = keys.shape[-1]
        mean, spread = self._recent_moments(group, length) if self.query_tokens else group.query_moments()
        ahead = group.turn(torch.arange(length, length + self.future_tokens))
        rotation = turned(
            torch.eye(dim)[None, None], Rope(ahead.cos.mean(0, keepdim=True), ahead.sin.mean(0, keepdim=True))
        )[0, 0]
        mean, spread = mean @ rotation, rotation.T @ spread @ rotation
        linear = torch.einsum("rgd,rsd->rgs", mean, keys) / dim**0.5
        squares = [torch.linalg.vecdot(keys @ of_head, keys) for of_head in spread.unbind(1)]  # [R, S] each
        return linear + torch.stack(squares, 1) / (2 * dim)

    def _recent_moments(self, group: GroupView, length: int) -> tuple[Tensor, Tensor]:
        """Of the last query_tokens queries: mean [R, G, D] and covariance [R, G, D, D]."""
        assert group.turn is not None, "the model's rotation was asked for"
        queries = group.queries()  # [R, w, G, D]
        asked = group.turn(torch.arange(length - queries.shape[1], length))
        plain = turned(queries, Rope(asked.cos, -asked.sin))
        mean = plain.mean(1)
        return mean, torch.einsum("rwgi,rwgj->rgij", plain - mean[:, None], plain - mean[:, None]) / plain.shape[1]


def turned(x: Tensor, rope: Rope) -> Tensor:
    """x [R, w, ..., D] rotated by cos, sin [w, R/2]."""
    half = rope.cos.shape[-1]
    shape = (1, rope.cos.shape[0], *(1,) * (x.dim() - 3), half)
    cos, sin = rope.cos.view(shape), rope.sin.view(shape)
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., 2 * half :]), dim=-1)


POLICY = ExpectedAttention
