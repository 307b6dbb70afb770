"""Memory for blocks that come next is there before they are written."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from kvarn.core.options import EngineOptions
from kvarn.core.specs import LayerSpec
from kvarn.kernels import load_backend
from kvarn.kernels._pages import make_present
from kvarn.kv.ahead import BlocksAhead
from kvarn.kv.manager import CacheManager
from kvarn.kv.sizing import plan_cache

LAYERS = [LayerSpec(2, 64, 64, 4)] * 8
MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")


def build(kv: str = "float32") -> CacheManager:
    """128 blocks, 64 MiB of keys and as much of values, in memory that nothing has written yet.

    The allocator may carve them out of what earlier tests gave back; trimming it lets go of the pages behind that.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    options = EngineOptions(kv=kv, block_size=128, context_tokens=4096, max_seqs=4, kv_memory_bytes=128 * MIB)
    plan = plan_cache(LAYERS, options, max_context=None, default_format="float32", free_bytes=0)
    return CacheManager(plan, LAYERS, load_backend("reference"))


def present_bytes(tensor: torch.Tensor) -> int:
    """What of a tensor the system backs with memory (mincore)."""
    begin = -(-tensor.data_ptr() // 4096) * 4096
    pages = (tensor.data_ptr() + tensor.untyped_storage().nbytes() - begin) // 4096
    found = (ctypes.c_ubyte * pages)()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(begin, pages * 4096, ctypes.addressof(found)) == 0
    return 4096 * sum(page & 1 for page in found)


@linux
def test_memory_is_present_ahead_of_what_was_taken() -> None:
    manager = build()
    (store,), (pool,) = manager.groups[0].stores, manager.groups[0].pools
    k, v = store.tensors()
    if not make_present(torch.empty(4 * MIB, dtype=torch.uint8), 0, 4 * MIB):
        pytest.skip("this system does not know MADV_POPULATE_WRITE")
    assert present_bytes(k) + present_bytes(v) < 8 * MIB, "nothing was written yet"
    ahead = BlocksAhead(manager.groups, 16 * MIB)
    assert fill(ahead) == 16, "a page of 2 MiB in each of 8 layers"
    whole, most = 16 * MIB, 34 * MIB  # layers begin anywhere in pages, so each may touch two
    assert whole <= present_bytes(k) <= most and whole <= present_bytes(v) <= most, "not the whole pool"
    ahead.after_step()
    assert fill(ahead) == 0
    assert pool.take(32) is not None and pool.fresh == 32
    ahead.after_step()
    assert fill(ahead) == 15, "a step's end does not wait for more than a page"
    assert present_bytes(v) >= 32 * MIB, "in each layer 2 MiB behind the 2 that were taken"


def test_what_a_tensor_holds_stays() -> None:
    numbers = torch.arange(3 * MIB, dtype=torch.int64)
    make_present(numbers, 5, numbers.untyped_storage().nbytes())
    assert torch.equal(numbers, torch.arange(3 * MIB, dtype=torch.int64))


def test_it_ends_at_the_end_of_a_pool() -> None:
    manager = build("int8")
    ahead = BlocksAhead(manager.groups, 1 << 40)
    for pool in manager.groups[0].pools:
        assert pool.take(pool.n_blocks // 2) is not None
    fill(ahead)
    for pool in manager.groups[0].pools:
        assert pool.take(pool.free_blocks) is not None
    assert fill(ahead) == 0
    assert fill(BlocksAhead(())) == 0


def fill(ahead: BlocksAhead) -> int:
    """How many pages were made present until nothing was lacking."""
    pages = 0
    while ahead.fill():
        pages += 1
        assert pages < 10_000
    return pages


def test_blocks_that_come_back_are_not_fresh() -> None:
    pool = build().groups[0].pools[0]
    taken = pool.take(3)
    assert taken is not None and pool.fresh == 3
    pool.give_back(taken)
    assert pool.take(2) is not None and pool.fresh == 3
