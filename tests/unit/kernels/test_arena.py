"""Matrices of a model lie one after the other, each at a page's beginning, and none over another."""

from __future__ import annotations

from kvarn.kernels._arena import ALIGN_BYTES, Arena


def test_what_is_taken_lies_apart_at_pages_beginnings_and_keeps_its_bytes() -> None:
    arena, sizes = Arena(chunk_bytes=5 * ALIGN_BYTES), (1, 4096, 4097, 12_000, 100_000, 7)
    taken = [arena.take(n) for n in sizes]
    for i, part in enumerate(taken):
        part.fill_(i)
    assert [len(part) for part in taken] == list(sizes)
    assert all(part.data_ptr() % ALIGN_BYTES == 0 for part in taken)
    assert all(bool((part == i).all()) for i, part in enumerate(taken))


def test_a_chunk_is_used_up_before_another_is_taken() -> None:
    arena = Arena(chunk_bytes=1 << 20)
    first, second = arena.take(5000), arena.take(100)
    assert second.data_ptr() - first.data_ptr() == 2 * ALIGN_BYTES
    far = arena.take(2 << 20)
    assert far.nbytes == 2 << 20
