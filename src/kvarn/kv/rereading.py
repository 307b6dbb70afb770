"""Reading a text again behind itself, without writing: how a policy learns which slots the model needs to repeat it.

The tokens that are read again attend to the cache as it is, and to each other; both parts merge by their log-sum-exp.
Nothing of them is stored, so they take no block, and the sequence goes on where it stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvarn.kernels.api import AttendParams, Backend, Rope, StepKernel, StepRows
from kvarn.kv.governing import governed
from kvarn.kv.group import CacheGroup
from kvarn.kv.places import LayerPlace
from kvarn.kv.reading import decoded


@dataclass(frozen=True, slots=True)
class Rereading:
    """One step in which tokens of the cached text, those at `again`, are read once more behind it; a
    `kvarn.kv.view.StepKV`. first_rows: the sequence's first row in each group, whose tables are cut by head.
    positions [T] int64. weights: for each group that policies govern, the largest softmax weight that any row and query
    head gives to each of the tokens at `again` [R, n] float32; filled as the layers run. own: rotated keys and values
    of this step by group and layer, for the layers that share another's cache."""

    groups: tuple[CacheGroup, ...]
    kernels: tuple[StepKernel, ...]
    places: tuple[LayerPlace | None, ...]
    first_rows: tuple[int, ...]
    positions: Tensor
    again: range
    weights: tuple[np.ndarray | None, ...]
    own: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def layer(self, index: int) -> RereadLayerKV:
        place = self.places[index]
        assert place is not None, f"layer {index} has no cache"
        return RereadLayerKV(self, place)

    def plain(self) -> None:
        """See `kvarn.kv.view.StepKV`: every layer's attention has two parts."""
        return


@dataclass(frozen=True, slots=True)
class RereadLayerKV:
    """A layer's cache in such a step; see `kvarn.kv.view.LayerKV`."""

    step: Rereading
    place: LayerPlace

    def append_and_attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, rope: Rope | None, params: AttendParams
    ) -> Tensor:
        kernel, at = self.step.kernels[self.place.group], (self.place.group, self.place.index)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        cached = kernel.append_and_attend(q, None, None, rope, self.place.index, params, lse)
        rotated = q if rope is None else kernel.rope(q, rope)
        if k is not None and v is not None:
            self.step.own[at] = (k if rope is None else kernel.rope(k, rope)), v
        own, own_lse = attend_own(rotated, *self.step.own[at], self.step.positions, params)
        total = torch.logaddexp(lse, own_lse)
        weights = self.step.weights[self.place.group]
        if weights is not None and self.place.writes:
            self._weigh(rotated.float(), total, params, weights)
        return (_share(cached.float(), lse, total) + _share(own, own_lse, total)).to(q.dtype)

    def _weigh(self, q: Tensor, total: Tensor, params: AttendParams, weights: np.ndarray) -> None:
        """Note the largest weight of each token that is read again. q [T, Hq, D]; total [T, Hq]."""
        group, again = self.step.groups[self.place.group], self.step.again
        heads, size = group.spec.kv_heads, group.block_size
        mine = range(self.place.index * heads, (self.place.index + 1) * heads)
        begin, end = again.start // size, -(-again.stop // size)
        keys = decoded(group, np.array(mine) + self.step.first_rows[self.place.group], begin, end)[0]
        keys = keys[:, again.start - begin * size :][:, : len(again)]
        for row, head_q, head_lse, k in zip(mine, q.chunk(heads, 1), total.chunk(heads, 1), keys, strict=True):
            logits = _capped(torch.einsum("tgd,sd->tgs", head_q, k) * params.scale, params)
            weights[row] = torch.exp(logits - head_lse[..., None]).amax((0, 1)).numpy()


def begin_rereading(
    groups: Sequence[CacheGroup],
    places: tuple[LayerPlace | None, ...],
    backend: Backend,
    first_rows: tuple[int, ...],
    length: int,
    n_tokens: int,
    again: range,
) -> Rereading:
    """A step of n_tokens behind a sequence of `length`, of which the tokens at `again` are read again."""
    positions = torch.arange(length, length + n_tokens)
    rows = StepRows(torch.tensor([0, n_tokens], dtype=torch.int32), positions.to(torch.int32), n_tokens)
    kernels = tuple(
        backend.begin_step(rows, g.table_view(np.array([row], dtype=np.int32)), g.views)
        for g, row in zip(groups, first_rows, strict=True)
    )
    weights = tuple(np.zeros((g.rows_per_seq, len(again)), np.float32) if governed(g.spec) else None for g in groups)
    return Rereading(tuple(groups), kernels, places, first_rows, positions, again, weights)


def attend_own(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, params: AttendParams) -> tuple[Tensor, Tensor]:
    """Causal attention of a step's tokens to each other alone: q [T, Hq, D], k [T, H, D], v [T, H, E], rotated;
    positions [T]. Returns out [T, Hq, E] float32 and its log-sum-exp [T, Hq]. A learned sink is not counted here, but
    with the cached part."""
    group = q.shape[1] // k.shape[1]
    grouped = q.float().unflatten(1, (k.shape[1], group))
    logits = _capped(torch.einsum("thgd,shd->thgs", grouped, k.float()) * params.scale, params)
    logits = logits.masked_fill(~_seen(positions, params)[:, None, None], -torch.inf)
    out = torch.einsum("thgs,she->thge", torch.softmax(logits, -1), v.float())
    return out.flatten(1, 2), torch.logsumexp(logits, -1).flatten(1, 2)


def _seen(positions: Tensor, params: AttendParams) -> Tensor:
    """bool [T, T]: which key (column) each query sees; itself at least."""
    query, key = positions[:, None], positions[None, :]
    seen = key <= query
    if params.window_tokens is not None:
        seen &= key > query - params.window_tokens
    if params.chunk_tokens is not None:
        seen &= key // params.chunk_tokens == query // params.chunk_tokens
    return seen


def _capped(logits: Tensor, params: AttendParams) -> Tensor:
    return params.soft_cap * torch.tanh(logits / params.soft_cap) if params.soft_cap else logits


def _share(out: Tensor, lse: Tensor, total: Tensor) -> Tensor:
    """A part's contribution to the whole; nothing where it saw no key."""
    weight = torch.exp(lse - total)[..., None]
    return torch.where(weight > 0, out * weight, 0.0)
