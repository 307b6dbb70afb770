"""From what was asked to a cache plan: formats, pool sizes, bytes, with the reasons. Integers only, no torch: the
planner and the engine both call this, so the plan is the allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvarn.core.errors import DoesNotFit, IncompatiblePlan, UnknownName
from kvarn.core.formats import KVFormat, parse_kv_format
from kvarn.core.options import CACHE_MODES, CachePlan, EngineOptions, Grain, GroupPlan, PoolPlan, rows_per_sequence
from kvarn.core.specs import GroupSpec, LayerSpec, cache_groups

UNSTATED_CONTEXT_TOKENS = 8192
FREE_SHARE = 0.5  # of the memory that is free, when no budget was stated


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def group_block_bytes(group: GroupSpec, kv: KVFormat, block_size: int) -> int:
    """Bytes of one block of a group: all its layers, all its KV heads."""
    spec = group.spec
    return len(group.layers) * spec.kv_heads * kv.block_bytes(spec.k_dim, spec.v_dim, block_size)


def spec_as_held(spec: LayerSpec, mode: str) -> LayerSpec:
    """The spec by which blocks are counted: the contiguous baseline reserves the context, window or not."""
    return replace(spec, window_tokens=None) if mode == "contiguous" else spec


def sequence_blocks(spec: LayerSpec, context_tokens: int, block_size: int) -> int:
    """Blocks that one sequence of context_tokens holds between steps: all of them, or those that touch the window."""
    full = blocks_for(context_tokens, block_size)
    if spec.window_tokens is None:
        return full
    return min(full, blocks_for(spec.window_tokens - 1, block_size) + 1)


def step_blocks(spec: LayerSpec, step_tokens: int, block_size: int) -> int:
    """Blocks that the tokens in flight need beside those held: a window group frees old blocks only after the step."""
    return 0 if spec.window_tokens is None else blocks_for(step_tokens, block_size) + 1


def table_columns(spec: LayerSpec, context_tokens: int, step_tokens: int, block_size: int) -> int:
    """Table columns that a row of this group can need."""
    held = sequence_blocks(spec, context_tokens, block_size) + step_blocks(spec, step_tokens, block_size)
    return min(held, blocks_for(context_tokens, block_size)) + 1


def bytes_per_token(layers: Sequence[LayerSpec], kv: KVFormat, block_size: int) -> int:
    """KV bytes that one token adds while every layer still holds it (a full block's share; exact for whole blocks)."""
    return sum(group_block_bytes(g, kv, block_size) for g in cache_groups(layers)) // block_size


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool before its size is known: at most `ceiling` columns; a column is one block of block_bytes a table row."""

    group: GroupSpec
    format: str
    column_bytes: int
    ceiling: int


def _pools(group: GroupSpec, kv: KVFormat, open_kv: KVFormat, asked: EngineOptions, context: int) -> tuple[_Pool, ...]:
    """The open pool first; a format that is written only when a block is sealed gets a pool of its own behind it."""
    size, seqs = asked.block_size, asked.max_seqs
    spec = spec_as_held(group.spec, asked.cache)
    held = seqs * sequence_blocks(spec, context, size) + step_blocks(spec, asked.step_tokens, size)
    if not kv.sealed_only:
        tiers = [parse_kv_format(name) for name in asked.tiers if spec.window_tokens is None]
        return tuple(_Pool(group, f.name, group_block_bytes(group, f, size), held) for f in (kv, *tiers))
    newest = seqs * (blocks_for(asked.residual_tokens, size) + 1) + blocks_for(asked.step_tokens, size) + 1
    return (
        _Pool(group, open_kv.name, group_block_bytes(group, open_kv, size), min(newest, held)),
        _Pool(group, kv.name, group_block_bytes(group, kv, size), held),
    )


def plan_cache(
    layers: Sequence[LayerSpec],
    asked: EngineOptions,
    *,
    max_context: int | None,
    default_format: str,
    free_bytes: int,
) -> CachePlan:
    """Decide the pools. max_context: the model's own limit, None if unstated. default_format: the float format of
    open blocks, and of all where `asked.kv` is None. free_bytes: memory to divide where `asked.kv_memory_bytes` is
    None. Raises DoesNotFit, IncompatiblePlan, UnknownName, ConfigError."""
    open_kv, kv = parse_kv_format(default_format), _asked_format(asked.kv or default_format)
    context = asked.context_tokens
    if context is None:
        context = max_context or UNSTATED_CONTEXT_TOKENS
    _check(asked, kv, context)
    pools = [p for g in cache_groups(layers) for p in _pools(g, kv, open_kv, asked, context)]
    budget = asked.kv_memory_bytes if asked.kv_memory_bytes is not None else int(free_bytes * FREE_SHARE)
    per_context = blocks_for(context, asked.block_size)
    unit = per_context if asked.cache == "contiguous" else 1
    n = 0 if asked.cache == "none" or not pools else _most_blocks(budget, pools, asked.max_seqs * per_context, unit)
    if pools and asked.cache != "none" and n < unit:
        least = sum(p.column_bytes * min(unit, p.ceiling) for p in pools)
        what = f"one reservation of {context} tokens" if unit > 1 else f"one block of {asked.block_size} tokens"
        raise DoesNotFit(
            f"the KV cache has {budget:,} B; {what} takes {least:,} B in {kv.name}",
            fixes=(f"--kv-memory {least}", "a shorter --context", "a smaller KV format", "a smaller --block-size"),
        )
    groups = tuple(
        GroupPlan(
            g,
            tuple(_sized(p, n, asked.grain) for p in pools if p.group is g),
            asked.grain,
            len(asked.tiers) if g.spec.window_tokens is None else 0,
        )
        for g in dict.fromkeys(p.group for p in pools)
    )
    return CachePlan(
        mode=asked.cache,
        block_size=asked.block_size,
        context_tokens=context,
        max_seqs=asked.max_seqs,
        step_tokens=asked.step_tokens,
        residual_tokens=asked.residual_tokens,
        groups=groups,
        bytes_per_token=bytes_per_token(layers, kv, asked.block_size),
        reasons=_reasons(asked, max_context, context, budget, n),
    )


def _sized(pool: _Pool, columns: int, grain: Grain) -> PoolPlan:
    rows = rows_per_sequence(pool.group, grain)
    return PoolPlan(pool.format, min(columns, pool.ceiling) * rows, pool.column_bytes // rows)


def _asked_format(text: str) -> KVFormat:
    try:
        return parse_kv_format(text)
    except ValueError as error:
        raise IncompatiblePlan(str(error), fixes=("--kv bfloat16", "--kv k=float16,v=bfloat16")) from error


def _check(asked: EngineOptions, kv: KVFormat, context: int) -> None:
    """Refuse figures that mean nothing and pairs that exclude each other."""
    if asked.cache not in CACHE_MODES:
        raise UnknownName("cache mode", asked.cache, CACHE_MODES)
    for name in ("block_size", "max_seqs", "step_tokens"):
        if (value := getattr(asked, name)) < 1:
            raise IncompatiblePlan(f"{name} is {value}; it must be at least 1")
    if asked.threads is not None and asked.threads < 1:
        raise IncompatiblePlan(f"threads is {asked.threads}; it must be at least 1")
    if asked.residual_tokens < 0:
        raise IncompatiblePlan(f"residual_tokens is {asked.residual_tokens}; it must not be negative")
    if context < 1:
        raise IncompatiblePlan(f"context is {context} tokens; it must be at least 1")
    if asked.kv_memory_bytes is not None and asked.kv_memory_bytes < 1:
        raise IncompatiblePlan(f"KV memory is {asked.kv_memory_bytes} B; it must be positive")
    if asked.cache == "contiguous" and asked.grain != "group":
        raise IncompatiblePlan(f"--cache contiguous has one table a sequence, not one a {asked.grain}")
    if asked.tiers and kv.sealed_only:
        raise IncompatiblePlan(
            f"{kv.name} beside tiers of {' and '.join(asked.tiers)}: tiers bring their own formats",
            fixes=("leave the format", "--kv bfloat16"),
        )
    if asked.cache != "paged" and kv.sealed_only:
        raise IncompatiblePlan(
            f"--cache {asked.cache} has no sealed blocks, and {kv.name} is written only when a block is sealed",
            fixes=("--cache paged", "--kv bfloat16"),
        )


def _reasons(asked: EngineOptions, max_context: int | None, context: int, budget: int, n: int) -> tuple[str, ...]:
    source = (
        "asked"
        if asked.context_tokens is not None
        else "the model's"
        if max_context
        else "a default, the model states none"
    )
    share = "asked" if asked.kv_memory_bytes is not None else f"{FREE_SHARE:.0%} of free memory"
    whole = asked.max_seqs * blocks_for(context, asked.block_size)
    return (
        f"context {context} tokens: {source}",
        f"KV budget {budget:,} B: {share}",
        f"{n} blocks of {asked.block_size} tokens; {asked.max_seqs} sequences of {context} tokens could take {whole}",
    )


def _most_blocks(budget: int, pools: Sequence[_Pool], whole: int, unit: int) -> int:
    """The largest n (a multiple of unit, at most `whole`) for which min(n, ceiling) blocks of each pool fit."""

    def cost(n: int) -> int:
        return sum(p.column_bytes * min(n, p.ceiling) for p in pools)

    low, high = 0, whole // unit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle * unit) <= budget else (low, middle - 1)
    return low * unit
