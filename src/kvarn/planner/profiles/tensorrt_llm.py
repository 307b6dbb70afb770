"""TensorRT-LLM: a share of the memory that is free once weights and activations stand, in blocks; a pool for each
window size. It prints GiB and the tokens of all blocks. Sources: kvCacheManager.cpp; TensorRT-LLM#1400 (a share of
free, not of total), #5371."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvarn.core.specs import LayerSpec
from kvarn.planner.profiles.base import (
    EngineCache,
    Figure,
    Flag,
    Profile,
    Split,
    ceil_div,
    pad,
    served_dtype,
    state_bytes,
    token_bytes,
)
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import GIB, MIB, parse_size, parse_tokens

BLOCK_32 = ((0, 17, 0), (2025, 3))  # tokens_per_block was 64 before


class TensorRtCache(EngineCache):
    """One rank of TensorRT-LLM."""

    def __init__(self, layers: Sequence[LayerSpec], settings: Settings) -> None:
        super().__init__(layers, settings)
        self.block_tokens = settings.block_size or (64 if settings.version.before(*BLOCK_32) else 32)
        self.pools: dict[int | None, Split] = {}
        for spec in self.layers:
            window = None if settings.window_full else spec.window_tokens
            self.pools[window] = self.pools.get(window, Split()) + token_bytes(spec, settings)
        self.pools = {w: s for w, s in self.pools.items() if s.total}
        self.state = sum(
            state_bytes(t, conv_dtype_bytes=2, state_dtype_bytes=2 if settings.state_dtype == "bfloat16" else 4)
            for spec in self.layers
            for t in spec.state
        )

    def _tokens(self, window: int | None, tokens: int) -> int:
        return pad(min(tokens, window or tokens), self.block_tokens)

    def held(self, sequences: int, tokens: int) -> Split:
        total = Split(state=self.state)
        for window, each in self.pools.items():
            total += each.times(self._tokens(window, tokens))
        return total.times(sequences)

    def growth(self) -> Split:
        return self.pools.get(None, Split())

    def blocks(self, available: int) -> int:
        """Blocks of the pool of whole contexts; window pools get what requests of the asked length need beside it."""
        length = self.settings.context_tokens
        per_request = self.held(1, length).total - self.state
        if not per_request:
            return 0
        if set(self.pools) == {None}:
            return available // (self.pools[None].total * self.block_tokens)
        return int(available * ceil_div(length, self.block_tokens) // per_request)

    def tokens(self, available: int) -> int:
        return self.blocks(available) * self.block_tokens

    def concurrency(self, available: int, tokens: int) -> float:
        if set(self.pools) == {None} and not self.state:
            return self.blocks(available) / ceil_div(tokens, self.block_tokens)
        return super().concurrency(available, tokens)

    def figures(self, available: int) -> tuple[Figure, ...]:
        return self.figures_at(self.blocks(available) * self.block_tokens)

    def figures_at(self, tokens: int) -> tuple[Figure, ...]:
        blocks = tokens // self.block_tokens
        rate = self.held(1, self.settings.context_tokens).total - self.state
        allocated = blocks * rate // max(1, ceil_div(self.settings.context_tokens, self.block_tokens))
        return (
            Figure("blocks", blocks, "blocks", f"{blocks}"),
            Figure("tokens", tokens, "tokens", f"{tokens}"),
            Figure("kv", allocated, "GiB", f"{allocated / GIB:.2f}", 0.01 * GIB),
        )

    def lines(self, available: int) -> tuple[str, ...]:
        f = {x.name: x.text for x in self.figures(available)}
        return (
            f"Number of blocks in KV cache primary pool: {f['blocks']}",
            f"[MemUsageChange] Allocated {f['kv']} GiB for max tokens in paged KV cache ({f['tokens']}).",
        )

    def details(self) -> tuple[tuple[str, str], ...]:
        return (("block", f"{self.block_tokens} tokens"), ("pools", f"{len(self.pools)}, one a window size"))


def resolve(settings: Settings, dtype: str) -> Settings:
    """Fill in TensorRT-LLM's defaults."""
    s = settings
    kv = served_dtype(dtype) if s.kv_k in (None, "auto") else s.kv_k
    return replace(s, kv_k=kv, kv_v=kv if s.kv_v in (None, "auto") else s.kv_v, batched_tokens=s.batched_tokens or 8192)


PROFILE = Profile(
    name="tensorrt-llm",
    flags=(
        Flag(("--max_seq_len",), "context_tokens", parse_tokens),
        Flag(("--max_batch_size",), "sequences", int),
        Flag(("--max_num_tokens",), "batched_tokens", parse_tokens),
        Flag(("--kv_cache_free_gpu_memory_fraction", "--free_gpu_memory_fraction"), "memory_fraction", float),
        Flag(("--kv_cache_dtype",), "kv_k", str),
        Flag(("--tokens_per_block",), "block_size", int),
        Flag(("--tp_size",), "tp", int),
        Flag(("--pp_size",), "pp", int),
        Flag(("--max_gpu_total_bytes",), "kv_memory_bytes", parse_size),
    ),
    cache=TensorRtCache,
    resolve=resolve,
    budget="free",
    fraction=0.9,
    runtime_bytes=(500 * MIB, 1500 * MIB),
)
