"""SGLang: one slot a token (rounded to its page), a state pool with one row more than its slots, and for models with
windows two pools in a ratio. Its log says GB and means GiB. Sources: mem_cache/memory_pool.py; sglang#11309 (the log
left the indexer out before), #15464, #18039."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.planner.profiles.base import (
    EngineCache,
    Figure,
    Flag,
    Profile,
    Split,
    add,
    index_bytes,
    pad,
    served_dtype,
    state_bytes,
    token_bytes,
)
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import GIB, MIB, parse_tokens

INDEXER_LOGGED = ((0, 5, 4), (2025, 10), 11309)
DEFAULT_RATIO = 0.8


class SglangCache(EngineCache):
    """One rank of SGLang."""

    def __init__(self, layers: Sequence[LayerSpec], settings: Settings) -> None:
        super().__init__(layers, settings)
        attention = [s for s in self.layers if s.kind in (LayerKind.ATTENTION, LayerKind.LATENT)]
        windowed = [s for s in attention if s.window_tokens and not settings.window_full]
        full = [s for s in attention if s not in windowed]
        self.mla = any(s.kind is LayerKind.LATENT for s in attention)
        self.full = add([token_bytes(s, settings) for s in full]) + self._draft(full)
        self.window = add([token_bytes(s, settings) for s in windowed])
        self.window_tokens = max((s.window_tokens or 0 for s in windowed), default=0)
        self.index = sum(index_bytes(s) for s in full)
        self.conv, self.state = self._states()

    def _draft(self, full: list[LayerSpec]) -> Split:
        return token_bytes(full[0], self.settings).times(self.settings.draft_layers) if full else Split()

    def _states(self) -> tuple[int, int]:
        """Bytes of one slot: convolution state and recurrent state."""
        wide = 2 if self.settings.state_dtype in ("bfloat16", "float16") else 4
        tensors = [t for s in self.layers for t in s.state]
        sizes = [state_bytes(t, conv_dtype_bytes=2, state_dtype_bytes=wide) for t in tensors]
        conv = sum(n for t, n in zip(tensors, sizes, strict=True) if "conv" in t.name)
        return conv, sum(sizes) - conv

    @property
    def page(self) -> int:
        return self.settings.block_size or 1

    def _ratio(self) -> float:
        return (self.settings.window_ratio or DEFAULT_RATIO) if self.window.total else 0.0

    def held(self, sequences: int, tokens: int) -> Split:
        slots = sequences * pad(tokens, self.page)
        windows = sequences * pad(min(tokens, self.window_tokens + (self.settings.batched_tokens or 0)), self.page)
        rows = (max(sequences, self.settings.slots or 0) + 1) if self.conv + self.state else 0
        state = Split(state=(self.conv + self.state) * rows)
        return self.full.times(slots) + self.window.times(windows) + state

    def growth(self) -> Split:
        return self.full

    def _pool(self, available: int) -> int:
        """Bytes left for tokens once the state pool has its rows."""
        rows = ((self.settings.slots or self.settings.sequences) + 1) if self.conv + self.state else 0
        return max(0, available - rows * (self.conv + self.state))

    def tokens(self, available: int) -> int:
        rate = self.full.total + self._ratio() * self.window.total
        pages = self._pool(available) / rate / self.page if rate else 0
        return max(0, int(pages) - 1) * self.page if rate else 0

    def blocks(self, available: int) -> int | None:
        return self.tokens(available) // self.page if self.page > 1 else None

    def concurrency(self, available: int, tokens: int) -> float:
        at_once = self.tokens(available) / pad(tokens, self.page)
        return min(at_once, float(self.settings.slots)) if self.settings.slots else at_once

    def pool_sizes(self, tokens: int) -> dict[str, int]:
        """Bytes of the pools for that many tokens, by the name the log gives them. Buffers have a page more; a count
        that is no whole number of pages was logged by an engine with single slots."""
        tokens += 1 if tokens % self.page else self.page
        slots = (self.settings.slots or self.settings.sequences) + 1
        windows = int(tokens * self._ratio())
        logged = self.full.k - (self.index if self.settings.version.before(*INDEXER_LOGGED[:2], pull=11309) else 0)
        sizes = {"kv": logged * tokens} if self.mla else {"k": logged * tokens, "v": self.full.v * tokens}
        if self.window.total:
            sizes |= {"window_k": self.window.k * windows, "window_v": self.window.v * windows}
        if self.conv + self.state:
            sizes |= {"conv_state": self.conv * slots, "ssm_state": self.state * slots}
        return sizes

    def figures(self, available: int) -> tuple[Figure, ...]:
        return self.figures_at(self.tokens(available))

    def figures_at(self, tokens: int) -> tuple[Figure, ...]:
        sizes = self.pool_sizes(tokens).items()
        return (
            Figure("tokens", tokens, "tokens", f"{tokens}"),
            *(Figure(name, size, "GiB", f"{size / GIB:.2f}", 0.01 * GIB) for name, size in sizes),
        )

    def lines(self, available: int) -> tuple[str, ...]:
        f = {x.name: x.text for x in self.figures(available)}
        size = f"KV size: {f['kv']} GB" if "kv" in f else f"K size: {f['k']} GB, V size: {f['v']} GB"
        lines = [f"KV Cache is allocated. #tokens: {f['tokens']}, {size}"]
        if "ssm_state" in f:
            slots = self.settings.slots or self.settings.sequences
            lines.insert(
                0,
                f"Mamba Cache is allocated. max_mamba_cache_size: {slots}, conv_state size: {f['conv_state']}GB, "
                f"ssm_state size: {f['ssm_state']}GB",
            )
        return tuple(lines)

    def notes(self) -> tuple[str, ...]:
        return ("SGLang's log says GB; these are GiB",)

    def details(self) -> tuple[tuple[str, str], ...]:
        rows = (
            (("state of a slot", f"{self.conv + self.state:,} B, in slots + 1 rows"),) if self.conv + self.state else ()
        )
        return (("page", f"{self.page} tokens"), *rows)


def resolve(settings: Settings, dtype: str) -> Settings:
    """Fill in SGLang's defaults."""
    s = settings
    kv = served_dtype(dtype) if s.kv_k in (None, "auto") else s.kv_k
    return replace(s, kv_k=kv, kv_v=kv if s.kv_v in (None, "auto") else s.kv_v, batched_tokens=s.batched_tokens or 8192)


PROFILE = Profile(
    name="sglang",
    flags=(
        Flag(("--context-length",), "context_tokens", parse_tokens),
        Flag(("--max-running-requests",), "sequences", int),
        Flag(("--chunked-prefill-size",), "batched_tokens", parse_tokens),
        Flag(("--mem-fraction-static",), "memory_fraction", float),
        Flag(("--kv-cache-dtype",), "kv_k", str),
        Flag(("--page-size",), "block_size", int),
        Flag(("--tp-size", "--tensor-parallel-size"), "tp", int),
        Flag(("--pp-size", "--pipeline-parallel-size"), "pp", int),
        Flag(("--dp-size", "--data-parallel-size"), "dp", int),
        Flag(("--max-mamba-cache-size",), "slots", int),
        Flag(("--mamba-ssm-dtype",), "state_dtype", str),
        Flag(("--swa-full-tokens-ratio",), "window_ratio", float),
        Flag(("--disable-hybrid-swa-memory",), "window_full", const=True),
        Flag(("--disable-cuda-graph",), "graphs", const=False),
        Flag(("--speculative-num-draft-tokens",), "draft_tokens", int),
    ),
    cache=SglangCache,
    resolve=resolve,
    budget="static",
    fraction=0.88,
    runtime_bytes=(500 * MIB, 1500 * MIB),
    graph_bytes=(200 * MIB, 2 * GIB),
)
