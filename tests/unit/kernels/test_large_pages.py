"""Large pages are asked for where a tensor spans any; its contents are not touched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvarn.kernels._pages import PAGE_BYTES, ask_for_large_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_a_tensor_smaller_than_a_page_is_left_alone() -> None:
    assert not ask_for_large_pages(torch.empty(PAGE_BYTES // 2, dtype=torch.uint8))


@pytest.mark.skipif(
    sys.platform != "linux" or not ENABLED.exists() or "[never]" in ENABLED.read_text(),
    reason="this system has no transparent large pages",
)
def test_a_large_tensor_lies_in_large_pages() -> None:
    tensor = torch.empty(8 * PAGE_BYTES, dtype=torch.uint8)
    assert ask_for_large_pages(tensor)
    tensor.fill_(7)
    assert advised(tensor.data_ptr() + tensor.nbytes // 2)
    assert bool((tensor == 7).all())


def advised(address: int) -> bool:
    """Whether the mapping that holds this address carries the system's mark `hg`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(x, 16) for x in head.split("-"))
            inside = begin <= address < end
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False
