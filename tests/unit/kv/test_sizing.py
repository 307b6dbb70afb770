"""From what was asked to the pools: the arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvarn.core.errors import DoesNotFit, IncompatiblePlan, UnknownName
from kvarn.core.options import CachePlan, EngineOptions
from kvarn.core.specs import LayerSpec
from kvarn.kv.sizing import UNSTATED_CONTEXT_TOKENS, blocks_for, plan_cache, sequence_blocks, table_columns

FULL = LayerSpec(kv_heads=2, k_dim=8, v_dim=8, query_heads=4)
WINDOW = replace(FULL, window_tokens=33)
OPTIONS = EngineOptions(block_size=16, context_tokens=100, max_seqs=3, step_tokens=20)
BLOCK_BYTES = 2 * (8 + 8) * 16 * 2  # heads, K and V channels, tokens, bytes of bfloat16


def plan(layers: list[LayerSpec], options: EngineOptions = OPTIONS, free: int = 1 << 30, **asked: object) -> CachePlan:
    options = replace(options, **asked)  # pyright: ignore[reportArgumentType]
    return plan_cache(layers, options, max_context=4096, default_format="bfloat16", free_bytes=free)


def test_equal_layers_are_one_group_and_one_block_holds_them_all() -> None:
    (group,) = plan([FULL] * 5).groups
    assert group.group.layers == (0, 1, 2, 3, 4)
    assert group.pools[0].block_bytes == 5 * BLOCK_BYTES
    assert plan([FULL] * 5).bytes_per_token == 5 * BLOCK_BYTES // 16


def test_pools_are_no_larger_than_all_sequences_can_use() -> None:
    full, window = plan([FULL, WINDOW, FULL]).groups
    assert full.pools[0].n_blocks == 3 * 7
    # Of the window's 32 earlier tokens and the newest, 3 blocks are touched; a step's 20 tokens take 2 and one more.
    assert window.pools[0].n_blocks == 3 * 3 + 3


def test_a_budget_is_never_exceeded_and_well_used() -> None:
    for budget in range(2 * BLOCK_BYTES, 40 * BLOCK_BYTES, 777):
        found = plan([FULL, WINDOW], kv_memory_bytes=budget)
        assert found.nbytes <= budget
        assert found.nbytes > budget - 2 * BLOCK_BYTES or found.nbytes == plan([FULL, WINDOW]).nbytes


def test_without_a_budget_half_of_what_is_free() -> None:
    assert plan([FULL], free=10 * BLOCK_BYTES).groups[0].pools[0].n_blocks == 5
    assert "50% of free memory" in " ".join(plan([FULL], free=10 * BLOCK_BYTES).reasons)


def test_contiguous_reserves_whole_contexts_windows_too() -> None:
    for group in plan([FULL, WINDOW], cache="contiguous").groups:
        assert group.pools[0].n_blocks == 3 * 7
    assert plan([FULL], cache="contiguous", kv_memory_bytes=13 * BLOCK_BYTES).groups[0].pools[0].n_blocks == 7
    with pytest.raises(DoesNotFit, match=r"one reservation of 100 tokens takes 7,168 B"):
        plan([FULL], cache="contiguous", kv_memory_bytes=6 * BLOCK_BYTES)


def test_recompute_has_no_pools() -> None:
    assert plan([FULL, WINDOW], cache="none").nbytes == 0


def test_a_sealed_format_gets_a_pool_behind_the_open_one() -> None:
    (group,) = plan([FULL], kv="int8", residual_tokens=16).groups
    opened, sealed = group.pools
    assert (opened.format, sealed.format) == ("bfloat16", "int8")
    # Newest tokens: a residual block and a partial one a sequence; a step's 20 tokens take 2 blocks and one more.
    assert opened.n_blocks == 3 * 2 + 3 and sealed.n_blocks == 3 * 7
    assert sealed.block_bytes < opened.block_bytes


@pytest.mark.parametrize("grain", ["layer", "head"])
def test_a_finer_grain_cuts_blocks_and_keeps_the_bytes(grain: str) -> None:
    (coarse,), (fine,) = plan([FULL] * 3).groups, plan([FULL] * 3, grain=grain).groups
    pieces = 3 if grain == "layer" else 6
    assert fine.rows_per_sequence == pieces
    assert fine.pools[0].block_bytes * pieces == coarse.pools[0].block_bytes
    assert fine.pools[0].nbytes == coarse.pools[0].nbytes


@pytest.mark.parametrize(
    ("window", "block", "expected"), [(1, 4, 1), (4, 4, 2), (5, 4, 2), (6, 4, 3), (33, 32, 2), (34, 32, 3)]
)
def test_blocks_that_touch_a_window(window: int, block: int, expected: int) -> None:
    """The most blocks that `window` consecutive positions touch, tried over all alignments."""
    touched = max(len({p // block for p in range(start, start + window)}) for start in range(block))
    spec = replace(FULL, window_tokens=window)
    assert sequence_blocks(spec, 1000, block) == touched == expected
    assert sequence_blocks(spec, 3, block) == min(touched, blocks_for(3, block))


def test_table_columns_suffice_for_a_step() -> None:
    assert table_columns(FULL, 100, 20, 16) == 7 + 1
    assert table_columns(WINDOW, 10_000, 20, 16) == 3 + 3 + 1


@pytest.mark.parametrize(
    ("asked", "stated", "expected"), [(50, 4096, 50), (None, 4096, 4096), (None, None, UNSTATED_CONTEXT_TOKENS)]
)
def test_which_context_counts(asked: int | None, stated: int | None, expected: int) -> None:
    options = replace(OPTIONS, context_tokens=asked)
    found = plan_cache([FULL], options, max_context=stated, default_format="bfloat16", free_bytes=1 << 30)
    assert found.context_tokens == expected and str(expected) in found.reasons[0]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"context_tokens": 0}, IncompatiblePlan),
        ({"cache": "paper"}, UnknownName),
        ({"kv": "bfloat17"}, UnknownName),
        ({"kv": "k=int8"}, IncompatiblePlan),
        ({"cache": "contiguous", "kv": "int8"}, IncompatiblePlan),
        ({"cache": "none", "kv": "int8"}, IncompatiblePlan),
        ({"cache": "contiguous", "grain": "head"}, IncompatiblePlan),
        ({"kv_memory_bytes": -5}, IncompatiblePlan),
        ({"kv_memory_bytes": BLOCK_BYTES - 1}, DoesNotFit),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        plan([FULL], **asked)


def test_a_model_without_attention_has_no_groups() -> None:
    assert plan([LayerSpec(), LayerSpec()]).groups == ()
