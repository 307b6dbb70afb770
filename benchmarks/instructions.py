"""Small fixed workloads of the scheduler, the pool, the manager and the kernels, whose instructions `scripts/callgrind`
counts. Run alone they are only timed.

The kernels run on the baseline instruction set and one thread, so that counts do not depend on the processor. Each
workload runs once before it is counted: what is made at first use does not count.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
import torch

from kvarn.core.events import Event
from kvarn.core.formats import parse_kv_format
from kvarn.core.ledger import NoRoom
from kvarn.core.options import EngineOptions
from kvarn.core.specs import LayerSpec
from kvarn.engine.scheduler import Scheduler
from kvarn.engine.sequence import Entry
from kvarn.engine.step_plan import SchedulerConfig
from kvarn.kernels.api import AttendParams, Codes, PoolView, StepRows, TableView
from kvarn.kernels.cpu.backend import CpuBackend
from kvarn.kernels.cpu.matrix import Matrix
from kvarn.kv.manager import CacheManager
from kvarn.kv.pool import BlockPool
from kvarn.kv.sizing import plan_cache
from kvarn.kv.step import Span

ISA, BLOCK = "baseline", 32
KV_HEADS, QUERY_HEADS, DIM = 3, 9, 64  # of SmolLM2-135M
Workload = Callable[[], object]


class CountingLedger:
    """Room for n_blocks blocks, counted: what a scheduler needs of a cache."""

    def __init__(self, n_blocks: int) -> None:
        self.free, self.held = n_blocks, dict[int, int]()

    def never_fits(self, total_tokens: int) -> str | None:
        return None

    def admit(
        self, seq_id: int, token_ids: Sequence[int], namespace: bytes, *, headroom_tokens: int = 0, reuse: bool = True
    ) -> int | NoRoom:
        need = -(-(len(token_ids) + headroom_tokens) // BLOCK)
        if need > self.free:
            return NoRoom(need - self.free)
        self.held[seq_id] = 0
        return 0

    def extend(self, seq_id: int, to_tokens: int) -> NoRoom | None:
        more = max(0, -(-to_tokens // BLOCK) - self.held[seq_id])
        if more > self.free:
            return NoRoom(more - self.free)
        self.held[seq_id] += more
        self.free -= more
        return None

    def fork(self, parent_id: int, child_id: int) -> NoRoom | None:
        raise NotImplementedError("no workload forks")

    def release(self, seq_id: int) -> None:
        self.free += self.held.pop(seq_id)


def scheduler_workload() -> Workload:
    """48 requests of 96 tokens and 16 more each, 16 at a time, in a cache too small for all: some are preempted."""

    def run() -> None:
        scheduler = Scheduler(SchedulerConfig(max_seqs=16, step_tokens=256, growth_tokens=0), CountingLedger(56))
        left = dict.fromkeys(range(48), 16)
        for i in left:
            scheduler.add(Entry(i, tuple(range(96)), 16, arrival_s=float(i), tenant=f"tenant {i % 3}"))
        now_s = 48.0
        while scheduler.has_work:
            now_s += 1.0
            for row in scheduler.schedule(now_s).rows:
                scheduler.advance(row.seq_id, row.n_tokens, (7,) if row.samples else ())
                left[row.seq_id] -= row.samples
                if left[row.seq_id] == 0:
                    scheduler.finish(row.seq_id)

    return run


def pool_workload() -> Workload:
    """64 sequences take blocks, fill them token by token, share them and give them back."""

    def run() -> None:
        pool, held = BlockPool(256, BLOCK), []
        for sequence in range(64):
            blocks = pool.take(3)
            assert blocks is not None, "192 of 256 blocks"
            slots = (np.array(blocks)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
            for at in range(0, slots.size, 8):
                pool.fill(slots[at : at + 8], np.arange(at, at + 8))
            if sequence % 2:
                pool.share(blocks)
                pool.give_back(blocks)
            held.append(blocks)
        for blocks in held:
            pool.give_back(blocks)

    return run


def manager_workload() -> Workload:
    """8 sequences that begin alike: admitted, prefilled and decoded for 40 steps with an int8 cache, the prefix index
    on; the kernels are prepared, but no model runs."""
    layers = [LayerSpec(KV_HEADS, DIM, DIM, QUERY_HEADS)] * 2
    options = EngineOptions(kv="int8", max_seqs=8, context_tokens=256, step_tokens=512, block_size=BLOCK)
    plan = plan_cache(layers, options, max_context=None, default_format="float32", free_bytes=1 << 28)
    backend, events = CpuBackend(ISA), list[Event]()

    def run() -> None:
        cache = CacheManager(plan, layers, backend, emit=events.append, model_id="model")
        ids = {i: [*range(64), *range(i * 100, i * 100 + 32)] for i in range(8)}
        for i, prompt in ids.items():
            cached = cache.admit(i, prompt, b"")
            assert isinstance(cached, int), "there is room"
            compute(cache, [(i, prompt[cached:])])
        for token in range(40):
            compute(cache, [(i, [token]) for i in ids])
        for i in ids:
            cache.release(i)
        events.clear()

    return run


def compute(cache: CacheManager, rows: Sequence[tuple[int, list[int]]]) -> None:
    """One step of these tokens without a model."""
    spans = []
    for seq_id, tokens in rows:
        start = cache.sequences[seq_id].length
        assert cache.extend(seq_id, start + len(tokens)) is None, "there is room"
        spans.append(Span(seq_id, start, len(tokens)))
    cache.settle(cache.begin_step(spans))
    for seq_id, tokens in rows:
        cache.commit(seq_id, tokens)


def filled_pool(name: str, n_blocks: int) -> PoolView:
    """One layer of full blocks with random numbers in a format."""
    fmt, shape = parse_kv_format(name), (n_blocks, 1, KV_HEADS)
    layouts = fmt.k.k_layout(DIM, BLOCK), fmt.v.v_layout(DIM, BLOCK)
    k, v = (tuple(torch.zeros((*shape, *t.shape), dtype=getattr(torch, t.dtype)) for t in s) for s in layouts)
    pool = PoolView(fmt, BLOCK, k, v, torch.arange(n_blocks * BLOCK, dtype=torch.int32).view(-1, BLOCK))
    if not fmt.sealed_only:
        for side in (*k, *v):
            side.copy_(torch.randn(side.shape, generator=torch.Generator().manual_seed(0)))
        return pool
    source, blocks = filled_pool("float32", n_blocks), torch.arange(n_blocks)
    CpuBackend(ISA).seal(source, blocks, pool, blocks)
    return pool


def attend_workload(name: str, tokens: int, n_queries: int, layers_run: int) -> Workload:
    """The last n_queries tokens of a sequence of `tokens` attend, layers_run times."""
    pool, columns = filled_pool(name, tokens // BLOCK), tokens // BLOCK
    block = torch.arange(columns, dtype=torch.int32)[None]
    whole, zero = torch.tensor([columns], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    table = TableView(torch.zeros_like(block, dtype=torch.uint8), block, whole, zero, 0, 0)
    positions = torch.arange(tokens - n_queries, tokens, dtype=torch.int32)
    rows = StepRows(torch.tensor([0, n_queries], dtype=torch.int32), positions, n_queries)
    q = torch.randn((n_queries, QUERY_HEADS, DIM), generator=torch.Generator().manual_seed(1))
    step, params = CpuBackend(ISA).begin_step(rows, table, (pool,)), AttendParams(DIM**-0.5)

    def run() -> None:
        for _ in range(layers_run):
            step.append_and_attend(q, None, None, None, 0, params)

    return run


def seal_workload(name: str) -> Workload:
    """8 blocks are sealed."""
    backend, source, target, blocks = CpuBackend(ISA), filled_pool("float32", 8), filled_pool(name, 8), torch.arange(8)
    return lambda: backend.seal(source, blocks, target, blocks)


def product_workload(bits: int, n_rows: int) -> Workload:
    """n_rows rows times a matrix of codes of 576 x 576, 8 times."""
    g = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 2**bits, (576, 576), generator=g, dtype=torch.uint8)
    held = Codes(codes, torch.full((576, 18), 0.01).half(), None, bits)
    matrix, x = Matrix(held, 576, isa=ISA), torch.randn((n_rows, 576), generator=g)

    def run() -> None:
        for _ in range(8):
            matrix.product(x)

    return run


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "scheduler": scheduler_workload,
    "pool": pool_workload,
    "manager": manager_workload,
    "attend_decode_float32": lambda: attend_workload("float32", 1024, 1, 4),
    "attend_decode_int8": lambda: attend_workload("int8", 1024, 1, 4),
    "attend_decode_int4": lambda: attend_workload("int4", 1024, 1, 4),
    "attend_decode_turbo3": lambda: attend_workload("turbo3", 1024, 1, 4),
    "attend_prefill_float32": lambda: attend_workload("float32", 128, 128, 1),
    "seal_int8": lambda: seal_workload("int8"),
    "seal_int4": lambda: seal_workload("int4"),
    "seal_turbo3": lambda: seal_workload("turbo3"),
    "product_int4": lambda: product_workload(4, 1),
    "product_int8": lambda: product_workload(8, 1),
}


@click.command()
@click.option("--requests", type=click.Path(path_type=Path), help="The built callgrind_requests.c.")
def main(requests: Path | None) -> None:
    """Run each workload twice; the second time is counted under `scripts/callgrind`, and timed."""
    torch.set_num_threads(1)
    valgrind = None if requests is None else ctypes.CDLL(str(requests))
    for name, make in WORKLOADS.items():
        run = make()
        run()
        gc.collect()
        gc.disable()
        begun_s = time.thread_time()
        if valgrind is not None:
            valgrind.kvarn_begin()
        run()
        if valgrind is not None:
            valgrind.kvarn_end(name.encode())
        click.echo(f"{name:24} {(time.thread_time() - begun_s) * 1e3:9.2f} ms")
        gc.enable()


if __name__ == "__main__":
    main()
