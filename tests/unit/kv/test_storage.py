"""The tensors behind the pools: their bytes are the plan's, and poison reaches every slot."""

from __future__ import annotations

import pytest
import torch

from kvarn.core.formats import format_names
from kvarn.core.options import EngineOptions
from kvarn.core.specs import LayerSpec
from kvarn.kernels import load_backend
from kvarn.kv.manager import CacheManager
from kvarn.kv.sizing import plan_cache

SPECS = {
    "mha": [LayerSpec(4, 32, 32, 4)] * 2,
    "gqa": [LayerSpec(2, 64, 64, 8)] * 3,
    "mqa, wide values": [LayerSpec(1, 32, 64, 4)] * 2,
    "windows": [LayerSpec(2, 32, 32, 4, window_tokens=40), LayerSpec(2, 32, 32, 4)] * 2,
    "shared": [LayerSpec(2, 32, 32, 4), LayerSpec(query_heads=4, shares_layer=0), LayerSpec()],
}


def build(spec: str, kv: str, grain: str = "group") -> CacheManager:
    options = EngineOptions(kv=kv, block_size=32, context_tokens=200, max_seqs=3, grain=grain, kv_memory_bytes=1 << 20)  # pyright: ignore[reportArgumentType]
    plan = plan_cache(SPECS[spec], options, max_context=None, default_format="bfloat16", free_bytes=0)
    return CacheManager(plan, SPECS[spec], load_backend("reference"), poison=True)


@pytest.mark.parametrize("grain", ["group", "layer", "head"])
@pytest.mark.parametrize("kv", [*format_names(), "k=int8,v=int4"])
@pytest.mark.parametrize("spec", SPECS)
def test_planned_bytes_are_allocated_bytes(spec: str, kv: str, grain: str) -> None:
    manager = build(spec, kv, grain)
    stores = [s for g in manager.groups for s in g.stores]
    held = [t.untyped_storage().nbytes() for s in stores for t in s.tensors()]
    assert sum(held) == sum(s.nbytes for s in stores) == manager.plan.nbytes == manager.memory().pool_bytes
    for group, planned in zip(manager.groups, manager.plan.groups, strict=True):
        for store, pool in zip(group.stores, planned.pools, strict=True):
            assert store.nbytes == pool.n_blocks * pool.block_bytes


@pytest.mark.parametrize("kv", format_names())
def test_bytes_per_token_are_a_full_blocks_share(kv: str) -> None:
    manager = build("gqa", kv)
    (group,) = manager.groups
    block = group.stores[-1]
    assert manager.plan.bytes_per_token == block.nbytes // group.pools[-1].n_blocks // 32


@pytest.mark.parametrize("kv", ["bfloat16", "int8", "k=int4,v=turbo3"])
def test_blocks_of_a_layer_stand_side_by_side(kv: str) -> None:
    view = build("gqa", kv).groups[0].stores[-1].view
    for t in (*view.k, *view.v):
        blocks, layers = t.shape[:2]
        assert t[0, 0].is_contiguous() and t.stride()[:2] == (t[0, 0].numel(), blocks * t[0, 0].numel()) and layers == 3


def test_every_slot_is_poisoned_at_first_and_when_freed() -> None:
    manager = build("gqa", "float32")
    (store,) = manager.groups[0].stores
    assert all(t.isnan().all() for t in store.tensors())
    for t in store.tensors():
        t.zero_()
    store.poison([1, 3])
    for t in store.tensors():
        assert t[[1, 3]].isnan().all() and not t[[0, 2]].isnan().any()
    store.poison_slots(torch.tensor([0 * 32 + 5, 2 * 32 + 31]))
    k, v = store.tensors()
    assert k[0, :, :, :, 5].isnan().all() and v[2, :, :, 31].isnan().all()
    assert k[0].isnan().sum() == k[0, :, :, :, 5].numel() and v[2].isnan().sum() == v[2, :, :, 31].numel()
