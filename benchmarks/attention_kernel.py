"""The attention kernel alone: bytes of KV and float operations a second, format by format, and the share of what this
machine can do (its read bandwidth or its float32 rate, measured in the same run, whichever binds).

    python benchmarks/attention_kernel.py --help
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import click
import torch
from torch import Tensor

from kvarn.core.formats import format_names, parse_kv_format
from kvarn.kernels._pages import ask_for_large_pages
from kvarn.kernels.api import AttendParams, PoolView, StepRows, TableView
from kvarn.kernels.cpu import _native
from kvarn.kernels.cpu.backend import CpuBackend

PROBE_BYTES = 256 << 20


def pool_of(name: str, n_blocks: int, layers: int, heads: int, dim: int, block_size: int) -> PoolView:
    """A pool of n_blocks full blocks with random content, sealed from floats by the backend itself."""
    fmt = parse_kv_format(name)
    layouts = fmt.k.k_layout(dim, block_size), fmt.v.v_layout(dim, block_size)
    by_layer = (layers, n_blocks, heads)  # in memory, as the engine's pools
    k, v = (
        tuple(torch.empty((*by_layer, *t.shape), dtype=getattr(torch, t.dtype)).transpose(0, 1) for t in side)
        for side in layouts
    )
    for tensor in (*k, *v):
        ask_for_large_pages(tensor)
    return PoolView(fmt, block_size, k, v, torch.zeros((n_blocks, block_size), dtype=torch.int32))


def fill(backend: CpuBackend, pool: PoolView, dim: int, chunk_blocks: int = 64) -> None:
    n_blocks, layers, heads = pool.k[0].shape[:3]
    source = pool_of("bfloat16", chunk_blocks, layers, heads, dim, pool.block_size)
    source.k[0].copy_(torch.randn_like(source.k[0]))
    source.v[0].copy_(torch.randn_like(source.v[0]))
    for at in range(0, n_blocks, chunk_blocks):
        blocks = torch.arange(at, min(at + chunk_blocks, n_blocks))
        backend.seal(source, blocks - at, pool, blocks)


def operands(pool: PoolView, sequences: int, tokens: int, queries: int, in_order: bool) -> tuple[StepRows, TableView]:
    """Each sequence holds `tokens` tokens, in randomly placed blocks or side by side; its last `queries` tokens ask."""
    columns = tokens // pool.block_size
    order = torch.arange if in_order else torch.randperm
    block = order(sequences * columns).to(torch.int32).view(sequences, columns)
    pool.positions[block.long()] = torch.arange(tokens, dtype=torch.int32).view(columns, -1)
    table = TableView(
        torch.zeros_like(block, dtype=torch.uint8),
        block,
        torch.full((sequences,), columns, dtype=torch.int32),
        torch.arange(sequences, dtype=torch.int32),
        0,
        0,
    )
    starts = torch.arange(sequences + 1, dtype=torch.int32) * queries
    positions = torch.arange(tokens - queries, tokens, dtype=torch.int32).repeat(sequences)
    return StepRows(starts, positions, queries), table


def median_s(run: Callable[[], object], repeats: int, threads: int) -> float:
    """Median seconds of a run: processor time with one thread (others' load does not count), else wall time."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    run()
    taken = []
    for _ in range(repeats):
        begin = clock()
        run()
        taken.append(clock() - begin)
    return statistics.median(taken)


@click.command()
@click.option("--sequences", default=16, show_default=True)
@click.option("--tokens", default=2048, show_default=True, help="Context of each sequence.")
@click.option("--queries", default=1, show_default=True, help="Query tokens a sequence: 1 is decode.")
@click.option("--kv-heads", default=3, show_default=True)
@click.option("--group", default=3, show_default=True, help="Query heads a KV head.")
@click.option("--dim", default=64, show_default=True)
@click.option("--layers", default=8, show_default=True, help="Layers to cycle through, so that caches do not help.")
@click.option("--block-size", default=32, show_default=True)
@click.option("--in-order", is_flag=True, help="Blocks side by side, as a sequence takes them from an empty pool.")
@click.option("--formats", default="all", show_default=True, help="Names separated by spaces.")
@click.option("--threads", default=torch.get_num_threads(), show_default=True)
@click.option("--repeats", default=9, show_default=True)
@click.option("--isa", default=None, help="Instruction set; the best one by default.")
@click.option("--json", "as_json", is_flag=True)
def main(
    sequences: int,
    tokens: int,
    queries: int,
    kv_heads: int,
    group: int,
    dim: int,
    layers: int,
    block_size: int,
    in_order: bool,
    formats: str,
    threads: int,
    repeats: int,
    isa: str | None,
    as_json: bool,
) -> None:
    """Measure attention over sealed blocks of each format."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    backend = CpuBackend(isa)
    probe = torch.ones(PROBE_BYTES, dtype=torch.uint8)
    read = _native.read_bandwidth(backend.isa, probe.data_ptr(), PROBE_BYTES, threads, 5)
    flops = _native.float_rate(backend.isa, threads, 5)
    results = []
    for name in format_names() if formats == "all" else formats.split():
        pool = pool_of(name, sequences * tokens // block_size, layers, kv_heads, dim, block_size)
        fill(backend, pool, dim)
        rows, table = operands(pool, sequences, tokens, queries, in_order)
        q = torch.randn(sequences * queries, kv_heads * group, dim).bfloat16()
        step, params = backend.begin_step(rows, table, (pool,)), AttendParams(dim**-0.5)

        def run(step=step, q=q, params=params) -> Tensor:
            for layer in range(layers):
                out = step.append_and_attend(q, None, None, None, layer, params)
            return out

        seconds = median_s(run, repeats, threads) / layers
        per_token = pool.format.block_bytes(dim, dim, block_size) / block_size * kv_heads
        seen = sum(tokens - queries + 1 + i for i in range(queries)) / queries
        work = 4 * dim * kv_heads * group * sequences * queries * seen
        results.append(
            {
                "format": name,
                "bits": per_token * 8 / (2 * dim * kv_heads),
                "us": seconds * 1e6,
                "bytes_per_s": per_token * sequences * tokens / seconds,
                "flops_per_s": work / seconds,
                "share": max(per_token * sequences * tokens / seconds / read, work / seconds / flops),
            }
        )
    if as_json:
        click.echo(json.dumps({"isa": backend.isa, "read_bytes_per_s": read, "flops_per_s": flops, "results": results}))
        return
    click.echo(f"{backend.isa}, {threads} threads: reads {read / 1e9:.1f} GB/s, float32 {flops / 1e9:.0f} GFLOP/s")
    click.echo(f"{'format':10} {'bits':>5} {'us/layer':>9} {'GB/s':>6} {'GFLOP/s':>8} {'share':>6}")
    for r in results:
        rates = f"{r['bytes_per_s'] / 1e9:6.2f} {r['flops_per_s'] / 1e9:8.1f} {r['share']:6.0%}"
        click.echo(f"{r['format']:10} {r['bits']:5.2f} {r['us']:9.0f} {rates}")


if __name__ == "__main__":
    main()
