"""Bit for bit: what a query gets does not depend on the batch around it, the chunking, or the number of threads."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvarn.core.formats import format_names
from kvarn.kernels.api import Backend, StepRows, TableView
from support.kernels import Bag, Heads, backend_ids, backends, make_bag, mixed_table, plain_params, queries, sealed

HEADS = (Heads(3, 3, 64, 64, 32), Heads(1, 4, 128, 128, 16), Heads(2, 1, 40, 48, 8), Heads(1, 7, 32, 32, 64))
POOLS = tuple(n for n in format_names() if n != "float32")  # float32 is the open pool of each case
BACKENDS = backends()


def take(bag: Bag, table: TableView, sequences: list[int], spans: list[tuple[int, int]]) -> tuple[StepRows, TableView]:
    """A step of some sequences, in that order, each with the query rows [begin, end) of its own."""
    starts = bag.rows.query_start.tolist()
    rows = [bag.rows.positions[starts[s] + a : starts[s] + b] for s, (a, b) in zip(sequences, spans, strict=True)]
    counts = [len(r) for r in rows]
    query_start = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    first = bag.table.first_row[torch.tensor(sequences)]
    picked = TableView(table.pool, table.block, table.length, first, table.layer_stride, table.head_stride)
    return StepRows(query_start, torch.cat(rows), max(counts)), picked


@pytest.mark.skipif(not BACKENDS, reason="the native kernels were not built")
@pytest.mark.parametrize("backend", BACKENDS, ids=backend_ids)
@settings(max_examples=12)
@given(data=st.data())
def test_batch_chunks_and_threads_change_no_bit(backend: Backend, data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from(HEADS))
    lengths = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=4))
    counts = [data.draw(st.integers(1, min(n, 90))) for n in lengths]
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
    stored = data.draw(st.lists(st.sampled_from(POOLS), min_size=1, max_size=4, unique=True))
    bag = make_bag(heads, lengths, counts, seed=data.draw(st.integers(0, 3)), drop=data.draw(st.sampled_from((0, 0.2))))
    pools = (bag.source, *(sealed(bag, name) for name in stored))
    table, q = mixed_table(bag, len(pools)), queries(bag, dtype)
    params = plain_params(bag, window_tokens=data.draw(st.sampled_from((None, 100))))
    starts = bag.rows.query_start.tolist()

    def run(sequences: list[int], spans: list[tuple[int, int]], threads: int) -> tuple[Tensor, Tensor]:
        rows, picked = take(bag, table, sequences, spans)
        mine = torch.cat([q[starts[s] + a : starts[s] + b] for s, (a, b) in zip(sequences, spans, strict=True)])
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            got = backend.attend(mine, rows, picked, pools, 1, params)
        finally:
            torch.set_num_threads(before)
        return got.out, got.lse

    together = run(list(range(len(lengths))), [(0, n) for n in counts], threads=1)
    for s, n in enumerate(counts):
        cut = data.draw(st.integers(0, n - 1))
        threads = data.draw(st.sampled_from((1, 2, 3)))
        parts = [run([s], [(a, b)], threads) for a, b in ((0, cut), (cut, n)) if b > a]
        for whole, pieces in zip(together, zip(*parts, strict=True), strict=True):
            assert torch.equal(whole[starts[s] : starts[s] + n], torch.cat(pieces))
