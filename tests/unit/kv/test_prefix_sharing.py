"""Manager and prefix index together: what is held once, and what is forgotten in time."""

from __future__ import annotations

from dataclasses import replace

from kvarn.core.options import EngineOptions, GroupPlan, PoolPlan
from kvarn.core.specs import LayerSpec
from kvarn.kernels import load_backend
from kvarn.kv.manager import CacheManager
from kvarn.kv.sizing import plan_cache
from kvarn.kv.step import Span

BLOCK = 4
TEXT = list(range(100, 120))


def make(
    blocks: int, *, sealed: str | None = None, residual: int = 0, window: int | None = None, step_tokens: int = 32
) -> CacheManager:
    layers = [LayerSpec(1, 2, 2, 1, window_tokens=window)]
    asked = EngineOptions(
        block_size=BLOCK,
        context_tokens=32,
        max_seqs=3,
        step_tokens=step_tokens,
        residual_tokens=residual,
        kv="float32",
    )
    plan = plan_cache(layers, asked, max_context=None, default_format="float32", free_bytes=1 << 30)
    (group,) = plan.groups
    pools = tuple(PoolPlan(f, blocks, group.pools[0].block_bytes) for f in ("float32", sealed) if f)
    plan = replace(plan, groups=(GroupPlan(group.group, pools, group.grain),))
    return CacheManager(plan, layers, load_backend("reference"), poison=True, model_id="a model")


def compute(manager: CacheManager, seq_id: int, tokens: list[int]) -> None:
    start = manager.sequences[seq_id].length
    assert manager.extend(seq_id, start + len(tokens)) is None
    manager.begin_step([Span(seq_id, start, len(tokens))])
    manager.commit(seq_id, tokens)
    manager.check()


def held(manager: CacheManager) -> list[int]:
    return [pool.held_blocks for pool in manager.groups[0].pools]


def test_a_text_computed_twice_is_held_once() -> None:
    manager = make(16)
    for seq_id in range(2):
        assert manager.admit(seq_id, TEXT, b"", reuse=False) == 0
    compute(manager, 0, TEXT[:17])
    assert held(manager) == [5]
    compute(manager, 1, TEXT[:17])
    assert held(manager) == [6]  # but for the open last block
    manager.release(0)
    assert held(manager) == [5]
    manager.release(1)
    assert held(manager) == [4]


def test_a_text_computed_twice_leaves_room_for_a_sequence_that_fills_the_cache() -> None:
    manager = make(6)
    manager.admit(0, TEXT[:9], b"")
    compute(manager, 0, TEXT[:9])
    manager.release(0)
    assert manager.never_fits(24) is None
    assert manager.admit(1, TEXT, b"", reuse=False) == 0
    for begin in range(0, 20, 5):
        compute(manager, 1, TEXT[begin : begin + 5])
    compute(manager, 1, [1, 2, 3, 4])
    assert held(manager) == [6]


def test_a_sealed_block_that_was_evicted_is_not_taken_for_the_seal_of_an_open_one() -> None:
    manager = make(8, sealed="float16", residual=4)
    manager.admit(0, TEXT[:4], b"")
    compute(manager, 0, TEXT[:4])
    assert manager.fork(0, 1) is None
    compute(manager, 0, [1, 2, 3, 4])  # seals the block that both share
    assert held(manager) == [2, 1]
    manager.release(0)
    assert manager.prefixes is not None
    assert len(manager.prefixes.make_room(0, 1, 8)) == 1
    assert held(manager) == [1, 0]
    compute(manager, 1, [5, 6, 7, 8])
    assert held(manager) == [1, 1]
    manager.release(1)
    manager.prefixes.reset()
    manager.check()
    assert held(manager) == [0, 0]


def test_window_blocks_behind_the_window_stay_only_as_long_as_there_is_room() -> None:
    manager = make(5, window=6, step_tokens=4)
    manager.admit(0, TEXT, b"")
    for begin in range(0, 20, 4):
        compute(manager, 0, TEXT[begin : begin + 4])
    assert held(manager) == [5]
    compute(manager, 0, [1, 2, 3, 4])
    assert held(manager) == [5]
    manager.release(0)
    assert manager.admit(1, [*TEXT, 1, 2, 3, 4, 5], b"") == 24
    manager.release(1)
    manager.check()
