"""Memory that tensors are laid into one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from kvarn.kernels._pages import ask_for_large_pages

CHUNK_BYTES, ALIGN_BYTES = 32 << 20, 4096


class Arena:
    """Uninitialised tensors side by side in large pages, which are never given back one by one.

    A matrix of a small model is smaller than a large page; alone it would stand in pages of 4 KiB, and reading all of
    them for each token would walk the page tables thousands of times.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, n_bytes: int) -> Tensor:
        """[n_bytes] uint8, at a page's beginning. What is left of a chunk costs no memory until it is written to."""
        if n_bytes > len(self._left):
            self._left = torch.empty(max(n_bytes, self._chunk_bytes) + ALIGN_BYTES, dtype=torch.uint8)
            ask_for_large_pages(self._left)
            self._left = self._left[-self._left.data_ptr() % ALIGN_BYTES :]
        taken, self._left = self._left[:n_bytes], self._left[-(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES :]
        return taken
