"""The manager's promises one by one; `tests/property/test_manager_machine.py` attacks them together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvarn.core.events import (
    BlocksDropped,
    BlocksTaken,
    Event,
    SequenceAdmitted,
    SequenceReleased,
)
from kvarn.core.ledger import NoRoom
from kvarn.core.options import EngineOptions
from kvarn.core.specs import LayerSpec
from kvarn.kernels import load_backend
from kvarn.kernels.api import AttendParams
from kvarn.kv.manager import CacheManager
from kvarn.kv.sizing import plan_cache
from kvarn.kv.step import CacheStep, Span

FULL = LayerSpec(2, 16, 16, 4)
WINDOW = replace(FULL, window_tokens=6)
BACKEND = load_backend("reference")


def make(layers: list[LayerSpec], blocks: int = 16, emit: Any = None, **options: Any) -> CacheManager:
    asked = EngineOptions(**{"block_size": 8, "context_tokens": 96, "max_seqs": 4, "step_tokens": 32, **options})
    roomy = plan_cache(layers, asked, max_context=None, default_format="float32", free_bytes=1 << 40)
    budget = blocks * sum(p.block_bytes * g.rows_per_sequence for g in roomy.groups for p in g.pools)
    asked = replace(asked, kv_memory_bytes=budget)
    plan = plan_cache(layers, asked, max_context=None, default_format="float32", free_bytes=0)
    return CacheManager(plan, layers, BACKEND, poison=True, emit=emit)


def write(manager: CacheManager, seq_id: int, n: int, *, keep: int | None = None, seed: int = 0) -> CacheStep:
    """Write random keys and values for the sequence's next n tokens into every layer."""
    start = manager.sequences[seq_id].length
    assert manager.extend(seq_id, start + n) is None
    step = manager.begin_step([Span(seq_id, start, n)])
    generator = torch.Generator().manual_seed(seed)
    for index, place in enumerate(manager.places):
        q, k, v = (torch.randn(n, h, 16, generator=generator) for h in (4, 2, 2))
        if place is not None:
            own = place.writes
            step.layer(index).append_and_attend(q, k if own else None, v if own else None, None, AttendParams(0.25))
    manager.commit(seq_id, [1] * (n if keep is None else keep), n)
    manager.check()
    return step


def admit(manager: CacheManager, seq_id: int, tokens: int = 1) -> None:
    assert manager.admit(seq_id, [1] * tokens, b"") == 0


@pytest.mark.parametrize("residual", [0, 9])
def test_as_many_sequences_run_over_a_quantized_cache_as_were_planned(residual: int) -> None:
    manager = make([FULL], blocks=60, kv="int8", residual_tokens=residual)
    for seq_id in range(4):
        assert manager.admit(seq_id, [1] * 32, b"", headroom_tokens=32 * seq_id) == 0, "others grow within their blocks"
        write(manager, seq_id, 32)
    for token in range(20):
        for seq_id in range(4):
            write(manager, seq_id, 1, seed=token)


def table(manager: CacheManager, seq_id: int, group: int = 0) -> tuple[list[int], list[int]]:
    return manager.groups[group].tables.entries(manager.sequences[seq_id].rows[group])


def test_blocks_come_on_demand_and_go_at_the_end() -> None:
    manager = make([FULL])
    admit(manager, 0)
    assert manager.memory().blocks == 0
    for length, blocks in ((7, 1), (8, 1), (9, 2), (17, 3)):
        write(manager, 0, length - manager.sequences[0].length)
        assert manager.memory().blocks == blocks
    manager.release(0)
    assert manager.memory().blocks == 0
    manager.check()


def test_memory_is_counted_from_the_ledgers() -> None:
    manager = make([FULL, FULL, WINDOW])
    admit(manager, 0)
    write(manager, 0, 20)
    memory = manager.memory()
    token = 2 * (16 + 16) * 4  # heads, K and V channels, bytes
    assert memory.logical_bytes == 20 * 3 * token
    # 3 full blocks of two layers; the window of 6 lies in the last block (tokens 16 to 19) and the one before.
    assert memory.physical_bytes == 8 * token * (3 * 2 + 2)
    assert (memory.tokens, memory.sequences, memory.blocks) == (20, 1, 5)
    assert (memory.stored_slots, memory.reserved_slots) == (20 + 12, 40)
    assert memory.utilisation == pytest.approx(32 / 40)
    assert manager.sequence_bytes(0) == (memory.physical_bytes, memory.logical_bytes)
    assert manager.sequence_bytes(9) == (0, 0)


def test_peak_is_the_fullest_moment() -> None:
    manager = make([FULL])
    admit(manager, 0)
    write(manager, 0, 30)
    manager.release(0)
    assert (manager.peak.blocks, manager.peak.tokens, manager.peak.stored_slots) == (4, 30, 30)
    manager.reset_peak()
    assert manager.peak.blocks == 0


def test_extend_is_all_or_nothing_over_groups() -> None:
    manager = make([FULL, WINDOW], blocks=2)
    admit(manager, 0)
    free = [g.pools[0].free_blocks for g in manager.groups]
    room = manager.extend(0, 17)
    assert isinstance(room, NoRoom) and room.short_by_blocks == 1 and "full attention" in str(room)
    assert [g.pools[0].free_blocks for g in manager.groups] == free
    assert manager.extend(0, 16) is None


def test_a_rejected_draft_leaves_nothing_behind() -> None:
    manager = make([FULL])
    admit(manager, 0)
    write(manager, 0, 5)
    write(manager, 0, 9, keep=2)
    (store,), (_, blocks) = manager.groups[0].stores, table(manager, 0)
    positions = manager.groups[0].pools[0].positions
    assert [p for b in blocks for p in positions[b].tolist() if p >= 0] == list(range(7))
    assert store.view.v[0][blocks[0], :, :, 7].isnan().all() and store.view.k[0][blocks[1]].isnan().all()
    before = table(manager, 0)
    write(manager, 0, 9)
    assert table(manager, 0) == before, "slots reserved once are used again"


def test_an_aborted_step_never_was() -> None:
    manager = make([FULL, WINDOW])
    admit(manager, 0)
    write(manager, 0, 5)
    before = manager.memory().stored_slots
    assert manager.extend(0, 11) is None
    spans = [Span(0, 5, 6)]
    manager.begin_step(spans)
    manager.abort_step([*spans, Span(99, 0, 3)])  # one that is gone meanwhile
    assert manager.memory().stored_slots == before and manager.sequences[0].length == 5
    manager.check()
    write(manager, 0, 6)


def test_begin_step_refuses_slots_that_do_not_exist() -> None:
    manager = make([FULL])
    admit(manager, 0)
    manager.extend(0, 8)
    for span in (Span(0, 0, 9), Span(0, 1, 2)):
        with pytest.raises(AssertionError, match="has no slots"):
            manager.begin_step([span])


def test_a_fork_shares_and_copies_only_the_block_it_writes() -> None:
    manager = make([FULL])
    admit(manager, 0)
    write(manager, 0, 20)
    assert manager.fork(0, 1) is None and manager.fork(0, 2) is None
    assert manager.memory().blocks == 3 and table(manager, 1) == table(manager, 0)
    write(manager, 1, 1, seed=1)
    assert manager.memory().blocks == 4
    (_, parent), (_, child) = table(manager, 0), table(manager, 1)
    assert child[:2] == parent[:2] and child[2] != parent[2]
    k = manager.groups[0].stores[0].view.k[0]
    assert torch.equal(k[child[2], ..., :4], k[parent[2], ..., :4])
    assert k[parent[2], ..., 4].isnan().all() and not k[child[2], ..., 4].isnan().any()
    write(manager, 0, 1, seed=2)
    write(manager, 2, 1, seed=3)  # the last one left keeps the block
    assert manager.memory().blocks == 5
    for seq_id in (1, 0, 2):
        manager.release(seq_id)
        manager.check()
    assert manager.memory().blocks == 0


def test_a_fork_does_not_share_slots_reserved_ahead() -> None:
    manager = make([FULL])
    admit(manager, 0)
    write(manager, 0, 20, keep=8)
    assert manager.fork(0, 1) is None
    assert len(table(manager, 0)[1]) == 3 and len(table(manager, 1)[1]) == 1
    write(manager, 0, 3, seed=1)
    write(manager, 1, 3, seed=2)
    assert table(manager, 0)[1][1] != table(manager, 1)[1][1]


def test_windows_drop_a_block_as_soon_as_nobody_sees_it() -> None:
    manager = make([WINDOW])
    admit(manager, 0)
    held = []
    for _ in range(40):
        write(manager, 0, 1)
        held.append(manager.memory().stored_slots)
    assert max(held) == 6 - 1 + 8 - 1 + 0 and held[-1] >= 5
    # Token 13 is the first whose successor no longer sees token 7, the last of block 0: 14 - 6 = 8.
    assert held[11] == 12 and held[12] == 13 - 8


@pytest.mark.parametrize("residual", [0, 1, 8, 20])
def test_blocks_older_than_the_residual_are_sealed(residual: int) -> None:
    manager = make([FULL], kv="int8", residual_tokens=residual)
    admit(manager, 0)
    for length in (3, 8, 9, 24, 31, 32):
        write(manager, 0, length - manager.sequences[0].length)
        pools, _ = table(manager, 0)
        settled = max(0, length - residual) // 8
        assert pools == [1] * settled + [0] * (len(pools) - settled)


def test_sealed_numbers_are_those_of_the_format() -> None:
    """What a sealed block decodes to is what encoding the full-precision block gives; positions move along."""
    manager = make([FULL], kv="int8", residual_tokens=0)
    plain = make([FULL])
    for each in (manager, plain):
        admit(each, 0)
        write(each, 0, 16, seed=5)
    (pools, sealed), (_, opened) = table(manager, 0), table(plain, 0)
    assert pools == [1, 1]
    exact = BACKEND.decode(plain.groups[0].views[0], torch.tensor(opened))
    found = BACKEND.decode(manager.groups[0].views[1], torch.tensor(sealed))
    for a, b in zip(exact, found, strict=True):
        assert 0 < (a - b).abs().max() < 0.03
    assert manager.groups[0].pools[1].positions[sealed].flatten().tolist() == list(range(16))
    assert manager.groups[0].stores[0].tensors()[0].isnan().all(), "open blocks are free again"


@pytest.mark.parametrize("first", [0, 1])
def test_a_shared_open_block_is_sealed_once_while_its_seal_lives(first: int) -> None:
    manager = make([FULL], kv="int8", residual_tokens=8)
    admit(manager, 0)
    write(manager, 0, 12)
    assert manager.fork(0, 1) is None
    write(manager, first, 4, seed=1)
    assert manager.groups[0].pools[1].held_blocks == 1
    write(manager, 1 - first, 4, seed=2)
    assert manager.groups[0].pools[1].held_blocks == 1, "sealed twice"
    assert table(manager, 0)[1][0] == table(manager, 1)[1][0]


def test_a_seal_that_is_gone_is_made_again() -> None:
    manager = make([FULL], kv="int8", residual_tokens=8)
    admit(manager, 0)
    write(manager, 0, 12)
    assert manager.fork(0, 1) is None
    write(manager, 0, 4, seed=1)
    manager.release(0)
    assert manager.groups[0].pools[1].held_blocks == 0
    write(manager, 1, 4, seed=2)
    assert table(manager, 1)[0] == [1, 0]


def test_contiguous_reserves_at_once_and_forks_by_copy() -> None:
    manager = make([FULL, WINDOW], blocks=48, cache="contiguous")
    admit(manager, 0)
    assert manager.memory().blocks == 2 * 12
    write(manager, 0, 20)
    assert manager.memory().blocks == 2 * 12 and manager.memory().utilisation < 0.3
    assert manager.fork(0, 1) is None
    (_, mine), (_, its) = table(manager, 0), table(manager, 1)
    assert not set(mine) & set(its) and its == list(range(its[0], its[0] + 12))
    k = manager.groups[0].stores[0].view.k[0]
    assert torch.equal(k[mine[:2]], k[its[:2]])
    write(manager, 0, 1, seed=1)
    write(manager, 1, 1, seed=2)
    assert not torch.equal(k[mine[2], ..., 4], k[its[2], ..., 4])


def test_admission_counts_what_the_running_ones_will_take() -> None:
    manager = make([FULL], blocks=4)
    room = manager.admit(0, [1] * 17, b"", headroom_tokens=9)
    assert isinstance(room, NoRoom) and room.short_by_blocks == 1 and not manager.sequences
    assert manager.admit(0, [1] * 17, b"", headroom_tokens=8) == 0


def test_no_more_sequences_than_planned() -> None:
    manager = make([FULL], max_seqs=2)
    admit(manager, 0)
    admit(manager, 1)
    for room in (manager.admit(2, [1], b""), manager.fork(0, 2)):
        assert isinstance(room, NoRoom) and "all 2 are in use" in str(room)
    manager.release(0)
    admit(manager, 2)


def test_never_fits_says_the_numbers() -> None:
    manager = make([FULL], blocks=3)
    assert manager.never_fits(24) is None
    block = 2 * 32 * 8 * 4
    assert manager.never_fits(25) == (
        f"25 tokens take 4 blocks of 8 tokens ({4 * block:,} B); the whole pool has 3 ({3 * block:,} B)"
    )
    assert manager.never_fits(97) == "97 tokens; the context is 96 tokens"


def test_events_tell_what_was_done() -> None:
    told: list[Event] = []
    manager = make([WINDOW], emit=told.append)
    admit(manager, 7)
    write(manager, 7, 12)
    write(manager, 7, 4)
    manager.release(7)
    assert [type(e) for e in told] == [
        SequenceAdmitted,
        BlocksTaken,
        BlocksDropped,
        SequenceReleased,
    ]
    assert {e.seq_id for e in told} == {7}
    taken, dropped = told[1], told[2]
    assert isinstance(taken, BlocksTaken) and isinstance(dropped, BlocksDropped)
    assert dropped.blocks == taken.blocks[:1] and dropped.why == "behind the window"
