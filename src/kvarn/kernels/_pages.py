"""Large memory pages for large tensors."""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

MADV_HUGEPAGE = 14  # linux/mman.h
PAGE_BYTES = 2 << 20


def ask_for_large_pages(tensor: Tensor) -> bool:
    """Ask the system to back a new CPU tensor, not yet written to, with pages of 2 MiB where it spans any. Blocks lie
    scattered over a pool: with pages of 4 KiB nearly each one costs a walk through the page tables. Returns whether the
    system agreed; where it does not (not Linux, switched off), nothing changes but the speed."""
    storage = tensor.untyped_storage()
    begin = -(-storage.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    length = (storage.data_ptr() + storage.nbytes()) // PAGE_BYTES * PAGE_BYTES - begin
    if sys.platform != "linux" or tensor.device.type != "cpu" or length <= 0:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise(begin, length, MADV_HUGEPAGE) == 0
