"""Memory for blocks that were never used, made present before a step writes into them.

The system gives a pool's memory when it is first written to, in pages of 2 MiB that it has to empty first: a few
milliseconds each, and where many sequences begin a block in the same step, several times what the step takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvarn.kernels._pages import PAGE_BYTES, make_present
from kvarn.kv.group import CacheGroup
from kvarn.kv.pool import BlockPool

AHEAD_BYTES = 256 << 20


class _Reach:
    """How far one tensor of a pool is present. size: bytes of a block."""

    def __init__(self, pool: BlockPool, tensor: Tensor) -> None:
        self._pool, self._tensor = pool, tensor
        self._bytes = tensor.untyped_storage().nbytes()
        self._size = self._bytes // max(1, pool.n_blocks)
        self._present = 0

    def lacks(self, ahead_bytes: int) -> int:
        """Bytes to make present until ahead_bytes behind the blocks that were ever taken are."""
        return min(self._bytes, self._pool.fresh * self._size + ahead_bytes) - self._present

    def go_on(self) -> bool:
        """One page more, behind what was written to anyway. False where the system does not do that."""
        begin = max(self._present, self._pool.fresh * self._size)
        self._present = min(self._bytes, begin + PAGE_BYTES)
        return self._bytes - begin < PAGE_BYTES or make_present(self._tensor, begin, self._present)


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
