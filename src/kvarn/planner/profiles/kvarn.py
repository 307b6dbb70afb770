"""Kvarn itself: the same sizing that the engine allocates from (`kvarn.kv.sizing`), so the plan is the allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from kvarn.core.errors import DoesNotFit, UnknownName
from kvarn.core.formats import Format, KVFormat, format_names, load_format
from kvarn.core.options import CachePlan, EngineOptions
from kvarn.core.specs import GroupSpec, LayerKind, LayerSpec, cache_groups
from kvarn.kv.sizing import FREE_SHARE, blocks_for, plan_cache, sequence_blocks
from kvarn.planner.formats import LATENT_RECORDS, ROW_FORMATS, known_row
from kvarn.planner.profiles.base import EngineCache, Figure, Flag, Profile, Split, add, token_bytes
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import MIB, parse_size, parse_tokens

DEFAULTS = EngineOptions()
_NAMES = {
    "f32": "float32",
    "fp32": "float32",
    "f16": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "fp8_e4m3",
    "kivi": "int2",  # KIVI (arXiv 2402.02750): keys by channel, values by token
    "kivi2": "int2",
    "kivi4": "int4",
}


@cache
def _format(name: str) -> Format:
    """A format by name; looking in the folder each time would take most of a plan's time."""
    return load_format(name)


@cache
def _own_formats() -> tuple[str, ...]:
    return format_names()


def as_stored(spec: LayerSpec) -> LayerSpec:
    """MLA as Kvarn would store it: one KV head whose key is latent, rope and indexer key, and no value."""
    if spec.kind is not LayerKind.LATENT:
        return spec
    width = spec.latent_dim + spec.rope_dim + spec.index_dim
    return LayerSpec(kv_heads=1, k_dim=width, query_heads=max(1, spec.query_heads), state=spec.state)


class KvarnCache(EngineCache):
    """One rank of Kvarn. Every group has a pool of its own, and a second one where the format is written on sealing."""

    def __init__(self, layers: Sequence[LayerSpec], settings: Settings) -> None:
        super().__init__([as_stored(spec) for spec in layers], settings)
        self.groups = cache_groups(self.layers)
        self.open = _format(settings.state_dtype or "bfloat16")
        self.kv = KVFormat(_format(settings.kv_k or "bfloat16"), _format(settings.kv_v or "bfloat16"))
        self.block_tokens = settings.block_size or DEFAULTS.block_size
        self.state = sum(spec.state_bytes for spec in self.layers)

    def _block(self, group: GroupSpec, k: Format, v: Format) -> Split:
        """Bytes of one block of a group."""
        spec, n = group.spec, len(group.layers) * group.spec.kv_heads
        value = v.v_block_bytes(spec.v_dim, self.block_tokens) if spec.v_dim else 0
        return Split(n * k.k_block_bytes(spec.k_dim, self.block_tokens), n * value)

    def _residual(self) -> int:
        return DEFAULTS.residual_tokens if self.settings.residual_tokens is None else self.settings.residual_tokens

    def held(self, sequences: int, tokens: int) -> Split:
        """Whole blocks. In a format written on sealing, the newest residual tokens and the block being written stand
        in the open format beside the sealed blocks."""
        total = Split(state=self.state)
        for group in self.groups:
            n = sequence_blocks(group.spec, tokens, self.block_tokens)
            if not self.kv.sealed_only:
                total += self._block(group, self.kv.k, self.kv.v).times(n)
                continue
            newest = blocks_for(self._residual(), self.block_tokens)
            total += self._block(group, self.open, self.open).times(min(n, newest + 1))
            total += self._block(group, self.kv.k, self.kv.v).times(max(0, n - newest))
        return total.times(sequences)

    def growth(self) -> Split:
        found = Split()
        for group in self.groups:
            if group.spec.window_tokens is None:
                block = self._block(group, self.kv.k, self.kv.v)
                found += Split(block.k // self.block_tokens, block.v // self.block_tokens)
        return found

    def options(self, available: int) -> EngineOptions:
        """What the engine would be asked for."""
        s = self.settings
        return EngineOptions(
            kv=self.kv.name,
            block_size=self.block_tokens,
            kv_memory_bytes=available,
            context_tokens=s.context_tokens,
            max_seqs=max(s.sequences, s.slots or DEFAULTS.max_seqs),
            step_tokens=s.batched_tokens or DEFAULTS.step_tokens,
            residual_tokens=self._residual(),
        )

    def cache_plan(self, available: int) -> CachePlan | None:
        """The engine's own plan for that much memory; None where not one block fits."""
        if available < 1:
            return None
        try:
            return plan_cache(
                self.layers,
                self.options(available),
                max_context=None,
                default_format=self.open.name,
                free_bytes=available,
            )
        except DoesNotFit:
            return None

    def blocks(self, available: int) -> int:
        plan = self.cache_plan(available)
        return max((pool.n_blocks for g in plan.groups for pool in g.pools), default=0) if plan else 0

    def tokens(self, available: int) -> int:
        return self.blocks(available) * self.block_tokens

    def longest(self, available: int, sequences: int) -> int:
        return super().longest(available, sequences) // self.block_tokens * self.block_tokens

    def figures(self, available: int) -> tuple[Figure, ...]:
        plan = self.cache_plan(available)
        if plan is None:
            return ()
        blocks = self.blocks(available)
        return (
            Figure("blocks", blocks, "blocks", f"{blocks}"),
            Figure("tokens", blocks * self.block_tokens, "tokens", f"{blocks * self.block_tokens:,}"),
            Figure("pools", plan.nbytes, "MiB", f"{plan.nbytes / MIB:.2f}", 0.01 * MIB),
        )

    def lines(self, available: int) -> tuple[str, ...]:
        plan = self.cache_plan(available)
        if plan is None:
            return ()
        pools = [
            f"pool {pool.format}: {pool.n_blocks} blocks x {pool.block_bytes:,} B = {pool.nbytes:,} B "
            f"({len(g.group.layers)} layers)"
            for g in plan.groups
            for pool in g.pools
        ]
        return (*pools, f"KV pools: {plan.nbytes:,} B")

    def details(self) -> tuple[tuple[str, str], ...]:
        sizes = ", ".join(
            f"{self._block(g, self.kv.k, self.kv.v).total:,} B ({len(g.layers)} layers)" for g in self.groups
        )
        return (("block", f"{self.block_tokens} tokens; a block takes {sizes}"),)


class BorrowedCache(EngineCache):
    """Kvarn's blocks with rows in a format that only other engines have, for comparison."""

    def __init__(self, layers: Sequence[LayerSpec], settings: Settings) -> None:
        super().__init__(layers, settings)
        self.block_tokens = settings.block_size or DEFAULTS.block_size
        self.groups = [(spec, token_bytes(spec, settings)) for spec in self.layers]
        self.state = sum(spec.state_bytes for spec in self.layers)

    def held(self, sequences: int, tokens: int) -> Split:
        blocks = [(t, sequence_blocks(spec, tokens, self.block_tokens)) for spec, t in self.groups]
        total = add([t.times(n * self.block_tokens) for t, n in blocks])
        return (total + Split(state=self.state)).times(sequences)

    def growth(self) -> Split:
        return add([t for spec, t in self.groups if spec.window_tokens is None])

    def blocks(self, available: int) -> int:
        return available // max(1, self.block_tokens * add([t for _, t in self.groups]).total)

    def tokens(self, available: int) -> int:
        return self.blocks(available) * self.block_tokens

    def notes(self) -> tuple[str, ...]:
        names = ", ".join(dict.fromkeys(str(n) for n in (self.settings.kv_k, self.settings.kv_v)))
        return (f"Kvarn's engine does not hold {names}: planned as other engines store it, in Kvarn's blocks",)


def make_cache(layers: Sequence[LayerSpec], settings: Settings) -> EngineCache:
    """Kvarn's own cache, or Kvarn's blocks in another engine's format. Raises UnknownName for a format of nobody's."""
    own = _own_formats()
    asked = [n for n in (settings.kv_k, settings.kv_v) if n is not None and n not in own]
    if all(n in own for n in (settings.kv_k, settings.kv_v) if n):
        return KvarnCache(layers, settings)
    if unknown := [n for n in asked if n.lower() not in LATENT_RECORDS and not known_row(n)]:
        raise UnknownName("KV format", unknown[0], (*own, *ROW_FORMATS, *LATENT_RECORDS))
    return BorrowedCache(layers, settings)


def resolve(settings: Settings, dtype: str) -> Settings:
    """Fill in Kvarn's defaults; the usual short names of formats are accepted."""
    s = settings
    float_type = _NAMES.get(dtype, dtype)
    k = float_type if s.kv_k in (None, "auto") else _NAMES.get(s.kv_k or "", s.kv_k)
    v = k if s.kv_v in (None, "auto") else _NAMES.get(s.kv_v or "", s.kv_v)
    return replace(s, kv_k=k, kv_v=v, state_dtype=float_type)


PROFILE = Profile(
    name="kvarn",
    flags=(
        Flag(("--step-tokens",), "batched_tokens", parse_tokens),
        Flag(("--residual-tokens",), "residual_tokens", int),
        Flag(("--max-seqs",), "slots", int),
        Flag(("--kv-memory",), "kv_memory_bytes", parse_size),
    ),
    cache=make_cache,
    resolve=resolve,
    budget="free",
    fraction=0.95,
    runtime_bytes=(150 * MIB, 450 * MIB),
    notes=(f"without --kv-memory Kvarn takes {FREE_SHARE:.0%} of the free memory for its cache; 95% is planned here",),
)
