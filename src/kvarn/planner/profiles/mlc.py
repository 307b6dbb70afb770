"""MLC-LLM: pages of 16 tokens, float16, and a workspace that its "KVCache" figure includes. It says MB and means MiB.
Source: cpp/serve/config.cc (kv_bytes_per_token, kv_aux_workspace_bytes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.planner.profiles.base import EngineCache, Figure, Flag, Profile, Split, add, pad, token_bytes
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import MIB, parse_tokens

INDEX_BYTES = 1.25  # a token's share of page tables
SMALL_CHUNK = ((0, 1, 1), (2024, 7))  # the default prefill chunk was 8192 before


class MlcCache(EngineCache):
    """One shard of MLC-LLM. Windows and recurrent state are not modelled: every layer keeps the whole context."""

    def __init__(self, layers: Sequence[LayerSpec], settings: Settings) -> None:
        super().__init__(layers, settings)
        self.token = add([token_bytes(spec, settings) for spec in self.layers])

    def workspace(self) -> int:
        """Bytes of the attention workspace that the engine counts into its cache."""
        heads = [(s.query_heads, s.kv_heads, s.k_dim) for s in self.layers if s.kind is LayerKind.ATTENTION]
        if not heads:
            return 0
        queries, kv, dim = max(heads)
        chunk, sequences = self.settings.batched_tokens or 2048, self.settings.sequences
        return (sequences + 1) * 88 + chunk * (queries + 1) * 8 + chunk * dim * (queries + kv) * 4 + 48 * MIB

    def held(self, sequences: int, tokens: int) -> Split:
        return self.token.times(sequences * pad(tokens, self.settings.block_size or 16))

    def growth(self) -> Split:
        return self.token

    def tokens(self, available: int) -> int:
        rate = self.token.total + INDEX_BYTES
        return int(max(0, available - self.workspace()) / rate) if self.token.total else 0

    def concurrency(self, available: int, tokens: int) -> float:
        return self.tokens(available) / tokens

    def reported_bytes(self, tokens: int) -> int:
        """The "KVCache" figure for a capacity of so many tokens."""
        return ceil(tokens * (self.token.total + INDEX_BYTES)) + self.workspace()

    def figures(self, available: int) -> tuple[Figure, ...]:
        return self.figures_at(self.tokens(available))

    def figures_at(self, tokens: int) -> tuple[Figure, ...]:
        size = self.reported_bytes(tokens)
        return (
            Figure("tokens", tokens, "tokens", f"{tokens}"),
            Figure("kv", size, "MiB", f"{size / MIB:.2f}", 0.01 * MIB),
        )

    def lines(self, available: int) -> tuple[str, ...]:
        f = {x.name: x.text for x in self.figures(available)}
        return (f"max KV cache token capacity is {f['tokens']}. (KVCache: {f['kv']} MB)",)

    def notes(self) -> tuple[str, ...]:
        odd = any(s.window_tokens or s.state or s.kind is LayerKind.LATENT for s in self.layers)
        said = ("MLC-LLM's log says MB; these are MiB",)
        return (
            (*said, "windows, latents and state are not modelled for MLC-LLM: whole contexts are counted")
            if odd
            else said
        )


def resolve(settings: Settings, dtype: str) -> Settings:
    """Fill in MLC's defaults: a float16 cache, whatever the weights are."""
    s = settings
    kv = "f16" if s.kv_k in (None, "auto") else s.kv_k
    chunk = 8192 if s.version.before(*SMALL_CHUNK) else 2048
    v = kv if s.kv_v in (None, "auto") else s.kv_v
    return replace(s, kv_k=kv, kv_v=v, batched_tokens=s.batched_tokens or chunk)


PROFILE = Profile(
    name="mlc",
    flags=(
        Flag(("--max-num-sequence",), "sequences", int),
        Flag(("--max-total-seq-length",), "total_context", parse_tokens),
        Flag(("--context-window-size",), "context_tokens", parse_tokens),
        Flag(("--prefill-chunk-size",), "batched_tokens", parse_tokens),
        Flag(("--gpu-memory-utilization",), "memory_fraction", float),
        Flag(("--tensor-parallel-shards",), "tp", int),
        Flag(("--kv-cache-page-size",), "block_size", int),
    ),
    cache=MlcCache,
    resolve=resolve,
    budget="total",
    fraction=0.85,
    runtime_bytes=(0, 300 * MIB),
)
