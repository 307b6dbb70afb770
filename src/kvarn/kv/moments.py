"""Mean and covariance of a sequence's queries before their rotation, by layer and query head: what queries to come are
taken to be like. Two sums a head instead of all queries, D and D x D numbers in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvarn.kernels.api import Rope

HELD_QUERIES = 32


@dataclass(slots=True)
class QueryMoments:
    """Sums over the queries of one group, but for the sequence's first `skip`. total [L, Hq, D], outer [L, Hq, D, D]
    float64, so that how the text was cut into steps shows in no number that is read. seen: queries so far, skipped ones
    included.

    A step of more than HELD_QUERIES is a part of a prompt, which counts as a whole or makes the sequence start again:
    its queries are added at once. Those of shorter steps are held until they count: held [L, n, Hq, D], pushed by
    layer.
    """

    skip: int
    layers: int
    seen: int = 0
    total: Tensor | None = None
    outer: Tensor | None = None
    held: list[Tensor] = field(default_factory=list)
    pushed: dict[int, Tensor] = field(default_factory=dict)

    def push(self, layer: int, q: Tensor, rope: Rope | None) -> None:
        """q [t, Hq, D]: this layer's queries of a step, not rotated; rope: of the same tokens."""
        new = q if rope is None else scaled(q, rope)
        if len(q) <= HELD_QUERIES:
            self.pushed[layer] = new.to(torch.float32, copy=True)
        else:
            self._add(layer, new[max(0, self.skip - self.seen) :][None])

    def commit(self, queries: int) -> None:
        """The first `queries` of the step's count."""
        if self.pushed:
            rows = torch.stack([self.pushed[layer] for layer in range(self.layers)])
            self.held.append(rows[:, max(0, self.skip - self.seen) : queries])
            self.pushed.clear()
        self.seen += queries
        if sum(rows.shape[1] for rows in self.held) >= HELD_QUERIES:
            self._settle()

    def abort(self) -> None:
        """The step's queries do not count; those of a long one do, so the sequence starts again."""
        self.pushed.clear()

    def _settle(self) -> None:
        """Add what is held."""
        if self.held:
            self._add(slice(None), torch.cat(self.held, dim=1))
            self.held.clear()

    @torch.inference_mode()  # whoever calls: what is made in that mode can only be changed in it
    def _add(self, layers: int | slice, q: Tensor) -> None:
        """q [l, t, Hq, D]."""
        by_head = q.to(torch.float64).transpose(1, 2)  # [l, Hq, t, D]
        if self.total is None or self.outer is None:
            shape = (self.layers, q.shape[2], q.shape[3])
            self.total, self.outer = (torch.zeros(s, dtype=torch.float64) for s in (shape, (*shape, q.shape[3])))
        self.total[layers] += by_head.sum(2).view_as(self.total[layers])
        self.outer[layers] += (by_head.transpose(-1, -2) @ by_head).view_as(self.outer[layers])

    def read(self) -> tuple[Tensor, Tensor]:
        """(mean [L, Hq, D], covariance [L, Hq, D, D]) float32, of at least one query."""
        self._settle()
        assert self.total is not None and self.outer is not None, "no query was seen"
        n = max(1, self.seen - self.skip)
        mean = self.total / n
        return mean.float(), (self.outer / n - mean[..., :, None] * mean[..., None, :]).float()

    def copy(self) -> QueryMoments:
        """For a sequence that goes on from here on its own."""
        total, outer = (None if t is None else t.clone() for t in (self.total, self.outer))
        return QueryMoments(self.skip, self.layers, self.seen, total, outer, list(self.held))


def scaled(q: Tensor, rope: Rope) -> Tensor:
    """q [t, H, D] as long as its rotation would make it: cos and sin hold any attention scaling."""
    half = rope.cos.shape[-1]
    by_channel = torch.ones((len(q), q.shape[-1]))
    by_channel[:, : 2 * half] = (rope.cos.square() + rope.sin.square()).sqrt().repeat(1, 2)
    return q * by_channel[:, None].to(q.dtype)
