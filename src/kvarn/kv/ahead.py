"""Memory for blocks that were never used, made present before a step writes into them.

The system gives a pool's memory when it is first written to, in pages of 2 MiB that it has to empty first: a few
milliseconds each, and where many sequences begin a block in the same step, several times what the step takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvarn.kernels._pages import PAGE_BYTES, SMALL_PAGE_BYTES, make_present
from kvarn.kv.group import CacheGroup
from kvarn.kv.pool import BlockPool

AHEAD_BYTES = 256 << 20


class _Reach:
    """How far one tensor of a pool is present, in the bytes of each of its layers; these take turns. size: bytes of a
    block in a layer."""

    def __init__(self, pool: BlockPool, tensor: Tensor) -> None:
        self._pool, self._tensor, self._layers = pool, tensor, tensor.shape[1]
        self._bytes = tensor.untyped_storage().nbytes() // self._layers
        self._size = self._bytes // max(1, pool.n_blocks)
        self._present = 0  # in every layer; in those before _next [_begin, _end) too
        self._begin = self._end = self._next = 0

    def lacks(self, ahead_bytes: int) -> int:
        """Bytes to make present until ahead_bytes behind the blocks that were ever taken are."""
        wanted = min(self._bytes, self._pool.fresh * self._size + ahead_bytes // self._layers)
        done, left = max(0, wanted - self._end), max(0, wanted - self._present)
        return self._next * done + (self._layers - self._next) * left

    def go_on(self) -> bool:
        """A page's bytes more, behind what was written to anyway. False where the system does not do that."""
        if self._next == 0:
            self._begin = max(self._present, self._pool.fresh * self._size)
            self._end = min(self._bytes, self._begin + PAGE_BYTES)
        first = self._next * self._bytes
        self._next = (self._next + 1) % self._layers
        if self._next == 0:
            self._present = self._end
        whole_pages = self._end - self._begin >= 2 * SMALL_PAGE_BYTES
        return not whole_pages or make_present(self._tensor, first + self._begin, first + self._end)


class BlocksAhead:
    """Keeps memory present behind the blocks of these groups that were ever taken: ahead_bytes, of all tensors
    together, are filled up in idle time. Not by a thread beside the steps: on busy cores each page would cost a step a
    time slice. Where the system cannot do it, nothing happens."""

    def __init__(self, groups: Sequence[CacheGroup], ahead_bytes: int = AHEAD_BYTES) -> None:
        pairs = [(p, t) for g in groups for p, s in zip(g.pools, g.stores, strict=True) for t in s.tensors()]
        self._reaches = [_Reach(pool, tensor) for pool, tensor in pairs]
        self._ahead_bytes = ahead_bytes // max(1, len(pairs))

    def fill(self) -> bool:
        """One page more, where there is nothing else to do. False: nothing is lacking."""
        return self._go_on(self._ahead_bytes)

    def after_step(self) -> None:
        """One page more where hardly any are left, so that what many sequences take at once is spread over steps."""
        self._go_on(self._ahead_bytes // 4)

    def _go_on(self, ahead_bytes: int) -> bool:
        most = max(self._reaches, key=lambda r: r.lacks(ahead_bytes), default=None)
        if most is None or most.lacks(ahead_bytes) <= 0:
            return False
        if not most.go_on():
            self._reaches = []
        return True
