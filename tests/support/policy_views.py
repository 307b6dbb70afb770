"""Views of a cache made of random tensors, so that a policy can be judged without a model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvarn.core.specs import LayerSpec
from kvarn.kernels.api import Rope
from kvarn.kv.policies.base import GroupView, SequenceView

DIM = 8


@dataclass(frozen=True)
class Numbers:
    """One group of one sequence. weights [L, H, T, G, T]: softmax weights of query t (second T: key), causal; k, v
    [L, H, T, D]. kept [R, S]: logical positions in physical places."""

    weights: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q: np.ndarray
    kept: np.ndarray
    query_tokens: int

    def _rows(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, *array.shape[2:])

    def keys(self) -> Tensor:
        return torch.from_numpy(np.take_along_axis(self._rows(self.k), self.kept[..., None], 1))

    def values(self) -> Tensor:
        return torch.from_numpy(np.take_along_axis(self._rows(self.v), self.kept[..., None], 1))

    def queries(self) -> Tensor:
        return torch.from_numpy(self._rows(self.q)[:, -self.query_tokens :])

    def query_moments(self) -> tuple[Tensor, Tensor]:
        """Of the random queries as if they were not rotated yet, the first two left out."""
        q = torch.from_numpy(self._rows(self.q)).double()[:, 2:]
        away = q - q.mean(1, keepdim=True)
        return q.mean(1).float(), (torch.einsum("rtgi,rtgj->rgij", away, away) / q.shape[1]).float()

    def recent_weights(self, row: int) -> np.ndarray:
        return self._rows(self.weights)[row, -self.query_tokens :][..., self.kept[row]]

    def recent_mass(self) -> np.ndarray:
        return np.stack([self.recent_weights(r).sum((0, 1)) for r in range(len(self.kept))])

    def reconstruction(self) -> np.ndarray:
        """As if all but the last query_tokens had been read again: what the weights of all queries were at most."""
        weights = np.take_along_axis(self._rows(self.weights).max((1, 2)), self.kept, 1)
        return np.where(self.kept < weights.shape[1] - self.query_tokens, weights, np.nan)

    def mass(self) -> np.ndarray:
        return np.take_along_axis(self._rows(self.weights).sum((1, 2)), self.kept, 1)


def random_view(
    seed: int, query_tokens: int = 1, *, layers: int = 2, heads: int = 2, group: int = 3, length: int = 40
) -> tuple[SequenceView, Numbers]:
    """Every row holds the whole text, its places in an order of their own."""
    generator = np.random.default_rng(seed)
    q = generator.normal(size=(layers, heads, length, group, DIM)).astype(np.float32) * 2
    k, v = (generator.normal(size=(layers, heads, length, DIM)).astype(np.float32) for _ in "kv")
    scores = np.einsum("lhtgd,lhsd->lhtgs", q, k) / DIM**0.5
    scores[..., :, :, :] = np.where(np.tri(length, dtype=bool)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    kept = np.stack([generator.permutation(length) for _ in range(layers * heads)])
    numbers = Numbers(weights.astype(np.float64), k, v, q, kept, query_tokens)
    spec = LayerSpec(heads, DIM, DIM, heads * group)
    fill = np.full(layers * heads, length, np.int32)
    view = GroupView(
        spec, tuple(range(layers)), heads, kept.astype(np.int32), fill, numbers.mass().astype(np.float64), numbers
    )
    tiers = {"formats": ("float32", "int8", "fp8_e4m3"), "block_bytes": (256, 80, 64)}
    view = replace(
        view, turn=turn, reconstruction=numbers.reconstruction(), pools=np.zeros(kept.shape, np.uint8), **tiers
    )
    return SequenceView(length, length, 4, layers * heads * DIM * 8, (view,)), numbers


def turn(positions: Tensor) -> Rope:
    """A rotary embedding of DIM channels."""
    angles = positions[:, None].float() * 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
    return Rope(angles.cos(), angles.sin())


def kept_positions(view: SequenceView, keep: np.ndarray | None) -> list[set[int]]:
    """For each row, the logical positions that a decision keeps."""
    group = view.groups[0]
    assert group is not None and keep is not None
    return [set(row[kept].tolist()) for row, kept in zip(group.positions, keep, strict=True)]
