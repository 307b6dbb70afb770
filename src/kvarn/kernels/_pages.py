"""Large memory pages for large tensors."""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23  # linux/mman.h; the second since Linux 5.14
PAGE_BYTES, SMALL_PAGE_BYTES = 2 << 20, 4 << 10


def ask_for_large_pages(tensor: Tensor) -> bool:
    """Ask the system to back a new CPU tensor, not yet written to, with pages of 2 MiB where it spans any. Blocks lie
    scattered over a pool: with pages of 4 KiB nearly each one costs a walk through the page tables. Returns whether the
    system agreed; where it does not (not Linux, switched off), nothing changes but the speed."""
    storage = tensor.untyped_storage()
    begin = -(-storage.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    length = (storage.data_ptr() + storage.nbytes()) // PAGE_BYTES * PAGE_BYTES - begin
    return tensor.device.type == "cpu" and _advise(begin, length, MADV_HUGEPAGE)


def make_present(tensor: Tensor, begin: int, end: int) -> bool:
    """Have the system back bytes [begin, end) of a CPU tensor's storage with memory now, whole pages of 4 KiB, without
    changing what they hold. Other threads may use the tensor meanwhile. Returns whether the system did."""
    address = tensor.untyped_storage().data_ptr()
    first = -(-(address + begin) // SMALL_PAGE_BYTES) * SMALL_PAGE_BYTES
    length = (address + end) // SMALL_PAGE_BYTES * SMALL_PAGE_BYTES - first
    return tensor.device.type == "cpu" and _advise(first, length, MADV_POPULATE_WRITE)


def _advise(address: int, length: int, advice: int) -> bool:
    if sys.platform != "linux" or length <= 0:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise(address, length, advice) == 0
