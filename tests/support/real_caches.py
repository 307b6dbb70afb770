"""Keys, values and queries of a fetched model on a real text, and what a KV format makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from kvarn.core.formats import parse_kv_format
from kvarn.core.options import EngineOptions
from kvarn.core.requests import SamplingParams
from kvarn.engine.build import assemble
from kvarn.kernels import load_backend
from kvarn.kernels.api import AttendParams, Backend, LayerProgram, PoolView, Rope, StepKernel, StepRows, TableView
from kvarn.models.loading import load_model
from kvarn.text import load_tokenizer
from support.fetched import fetched

TEXT = "alice.txt"
BLOCK_TOKENS = 32


@dataclass(frozen=True, eq=False)
class LayerQueries:
    """What one layer asked: q [T, Hq, D] rotated, of the layer with this index within its group."""

    group: int
    layer: int
    q: Tensor
    params: AttendParams


@dataclass(frozen=True, eq=False)
class RealCache:
    """A text's whole blocks in float32, in order: one pool a cache group, [blocks, layers, heads, ...]."""

    backend: Backend
    tokens: int
    pools: tuple[PoolView, ...]
    asked: tuple[LayerQueries, ...]

    def sealed(self, group: int, name: str) -> PoolView:
        """The group's blocks in another format."""
        source, fmt = self.pools[group], parse_kv_format(name)
        shape, (k_dim, v_dim) = source.k[0].shape[:3], (source.k[0].shape[3], source.v[0].shape[4])
        layouts = fmt.k.k_layout(k_dim, BLOCK_TOKENS), fmt.v.v_layout(v_dim, BLOCK_TOKENS)
        k, v = (tuple(torch.zeros((*shape, *t.shape), dtype=getattr(torch, t.dtype)) for t in s) for s in layouts)
        target = PoolView(fmt, BLOCK_TOKENS, k, v, source.positions)
        self.backend.seal(source, torch.arange(shape[0]), target, torch.arange(shape[0]))
        return target

    def decoded(self, group: int, name: str) -> tuple[Tensor, Tensor]:
        """(k, v) [blocks, layers, heads, tokens, channels] as they come back from the format."""
        pool = self.sealed(group, name)
        k, v = self.backend.decode(pool, torch.arange(pool.positions.shape[0]))
        return k.transpose(-1, -2), v

    def attended(self, group: int, name: str) -> list[Tensor]:
        """What each of the group's layers reads from its cache in this format, for all of the text's queries."""
        pool, blocks = self.sealed(group, name), self.tokens // BLOCK_TOKENS
        rows = StepRows(_int32(0, self.tokens), torch.arange(self.tokens).int(), self.tokens)
        block = torch.arange(blocks).int()[None]
        table = TableView(torch.zeros_like(block, dtype=torch.uint8), block, _int32(blocks), _int32(0), 0, 0)
        layers = [a for a in self.asked if a.group == group]
        return [self.backend.attend(a.q, rows, table, (pool,), a.layer, a.params).out for a in layers]


class _Listening:
    """A backend that remembers what the layers ask in its first step; all else is the backend's own."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.asked, self.steps = backend, [], 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def decoder(self, layers: Sequence[LayerProgram]) -> None:
        """None: layers must ask one by one to be heard."""
        return

    def begin_step(
        self, rows: StepRows, table: TableView, pools: Sequence[PoolView], slots: Tensor | None = None
    ) -> Any:
        kernel = self._backend.begin_step(rows, table, pools, slots)
        self.steps += 1
        return _ListeningStep(kernel, self.asked, self.steps - 1)


class _ListeningStep:
    def __init__(self, kernel: StepKernel, asked: list[LayerQueries], group: int) -> None:
        self._kernel, self._asked, self._group = kernel, asked, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def append_and_attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: Rope | None,
        layer: int,
        params: AttendParams,
        lse: Tensor | None = None,
    ) -> Tensor:
        rotated = q.clone() if rope is None else self._kernel.rope(q.clone(), rope).clone()
        self._asked.append(LayerQueries(self._group, layer, rotated, params))
        return self._kernel.append_and_attend(q, k, v, rope, layer, params, lse)


def real_cache(name: str, tokens: int) -> RealCache:
    """Prefill the first `tokens` tokens (whole blocks) of a text through the model in float32, in one step. Skips the
    test where the model is not fetched."""
    assert tokens % BLOCK_TOKENS == 0, "whole blocks"
    found, backend = fetched(name), load_backend(None)
    tokenizer, heard = load_tokenizer(found), _Listening(backend)
    ids = tokenizer.encode((files("kvarn.evals") / "texts" / TEXT).read_text("utf-8"))[:tokens]
    options = EngineOptions(
        weights="float32",
        kv="float32",
        block_size=BLOCK_TOKENS,
        step_tokens=tokens,
        context_tokens=tokens + 1,
        max_seqs=1,
    )
    engine = assemble(load_model(found, "float32"), tokenizer, heard, options, fingerprint=name).engine
    engine.add_request("text", ids, SamplingParams(max_tokens=1))
    engine.step()
    groups = engine.cache.groups  # the prefix index still holds the text's blocks
    assert heard.steps == len(groups), "the text must be one step"
    return RealCache(backend, tokens, tuple(_in_order(g.views[0], tokens) for g in groups), tuple(heard.asked))


def _in_order(pool: PoolView, tokens: int) -> PoolView:
    """The text's blocks alone, oldest first."""
    first = pool.positions[:, 0]
    held = torch.nonzero(first >= 0).flatten()
    blocks = held[first[held].argsort()]
    positions = pool.positions[blocks].clone()
    assert positions.flatten().tolist() == list(range(tokens)), "the whole text is in the cache"
    return PoolView(pool.format, BLOCK_TOKENS, (pool.k[0][blocks],), (pool.v[0][blocks],), positions)


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
