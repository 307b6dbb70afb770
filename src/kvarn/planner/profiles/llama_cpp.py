"""llama.cpp: cells allocated up front, padded to 256 a stream; window layers keep the window and one micro-batch;
recurrent rows in float32, one for each slot and draft token. Sources: llama-kv-cache-iswa.cpp,
llama-memory-recurrent.cpp, llama-context.cpp; MLA latents since pull request 12801 (April 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.planner.formats import row_format
from kvarn.planner.profiles.base import (
    EngineCache,
    Figure,
    Flag,
    Profile,
    Split,
    add,
    pad,
    state_bytes,
    token_bytes,
)
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import GIB, MIB, parse_tokens

MLA = ((5140,), (2025, 4))
WINDOWS = ((5439,), (2025, 5))  # window layers got caches of their own
CELLS = 256
UBATCH = 512


class LlamaCppCache(EngineCache):
    """One device, or all of them: layers are split whole, and unevenly, over devices."""

    def __init__(self, layers: Sequence[LayerSpec], settings: Settings) -> None:
        super().__init__(layers, settings)
        rows = [(self._token(s), s.window_tokens, s.kind) for s in self.layers]
        rows = [r for r in rows if r[0].total]
        separate = not settings.version.before(*WINDOWS)
        self.window = max((w or 0 for _, w, _ in rows), default=0) if separate and self._mixed(rows) else 0
        self.full = add([t for t, w, _ in rows if not (self.window and w)])
        self.swa = add([t for t, w, _ in rows if self.window and w])
        self.full_layers = sum(1 for _, w, _ in rows if not (self.window and w))
        self.swa_layers = len(rows) - self.full_layers
        self.draft = rows[-1][0].times(settings.draft_layers) if rows else Split()
        tensors = [t for s in self.layers for t in s.state]
        self.conv = sum(4 * t.elements for t in tensors if "conv" in t.name)
        self.state = sum(state_bytes(t, conv_dtype_bytes=4, state_dtype_bytes=4) for t in tensors) - self.conv

    @staticmethod
    def _mixed(rows: list) -> bool:
        """A window that holds for every layer is not treated apart (Phi-3: the allocator ignores it)."""
        return len({bool(w) for _, w, _ in rows}) > 1

    def _token(self, spec: LayerSpec) -> Split:
        """An indexer's keys are stored in K's format; a latent layer has no V, but for ik_llama.cpp's -mla 1, which
        keeps a transposed copy of the latents in f16, and for builds from before latents, which keep whole heads."""
        s = self.settings
        plain = token_bytes(replace(spec, index_dim=0), s) + Split(k=row_format(s.kv_k or "f16").row(1, spec.index_dim))
        if spec.kind is not LayerKind.LATENT or s.mla == "latent":
            return plain
        if s.mla == "latent+kv":
            return plain + Split(v=2 * spec.latent_dim)
        expanded = replace(spec, latent_dim=0, rope_dim=0, index_dim=0, kv_heads=spec.query_heads)
        return token_bytes(expanded, s)

    def streams(self, sequences: int) -> int:
        return 1 if self.settings.unified else sequences

    def cells(self, sequences: int, tokens: int) -> tuple[int, int]:
        """Full and window cells of one stream in which every sequence can reach `tokens`."""
        sharing = sequences if self.settings.unified else 1
        full = pad(tokens * sharing, CELLS)
        if not self.window or self.settings.window_full:
            return full, full if self.window else 0
        return full, min(full, pad(self.window * sharing + (self.settings.batched_tokens or UBATCH), CELLS))

    def held(self, sequences: int, tokens: int) -> Split:
        full, window = self.cells(sequences, tokens)
        streams = self.streams(sequences)
        kv = (self.full + self.draft).times(full * streams) + self.swa.times(window * streams)
        rows = sequences * (1 + self.settings.draft_tokens)
        return kv + Split(state=(self.conv + self.state) * rows)

    def growth(self) -> Split:
        return self.full + self.draft + (self.swa if self.settings.window_full else Split())

    def tokens(self, available: int) -> int:
        return self.longest(available, self.settings.sequences) // CELLS * CELLS * self.settings.sequences

    def longest(self, available: int, sequences: int) -> int:
        return super().longest(available, sequences) // CELLS * CELLS

    def figures(self, available: int) -> tuple[Figure, ...]:
        s = self.settings
        full, window = self.cells(s.sequences, s.context_tokens)
        held, streams = self.held(s.sequences, s.context_tokens), self.streams(s.sequences)
        sizes = {
            "kv": held.k + held.v - self.draft.total * full * streams,
            "k": held.k - self.draft.k * full * streams,
            "v": held.v - self.draft.v * full * streams,
            "full": self.full.total * full * streams,
            "window": self.swa.total * window * streams,
            "state": held.state,
            "conv_state": self.conv * s.sequences * (1 + s.draft_tokens),
            "ssm_state": self.state * s.sequences * (1 + s.draft_tokens),
            "draft": self.draft.total * full * streams,
        }
        return (
            Figure("cells", full, "cells", f"{full}"),
            Figure("window_cells", window, "cells", f"{window}"),
            *(Figure(name, n, "MiB", f"{n / MIB:.2f}", 0.01 * MIB) for name, n in sizes.items() if n),
        )

    def lines(self, available: int) -> tuple[str, ...]:
        s, f = self.settings, {x.name: x for x in self.figures(available)}
        streams = self.streams(s.sequences)
        found = []
        for name, split, layers in (("full", self.full, self.full_layers), ("window", self.swa, self.swa_layers)):
            if not split.total:
                continue
            cells = int(f["cells" if name == "full" else "window_cells"].value)
            k, v = (part * cells * streams / MIB for part in (split.k, split.v))
            found.append(
                f"llama_kv_cache: size = {(k + v):7.2f} MiB ({cells:6d} cells, {layers:3d} layers, "
                f"{s.sequences:2d}/{streams} seqs), K ({s.kv_k}): {k:7.2f} MiB, V ({s.kv_v}): {v:7.2f} MiB"
            )
        if self.state + self.conv:
            r, m = (f[n].value / MIB if n in f else 0.0 for n in ("conv_state", "ssm_state"))
            rows = s.sequences * (1 + s.draft_tokens)
            n_state = sum(1 for spec in self.layers if spec.state)
            found.append(
                f"llama_memory_recurrent: size = {r + m:7.2f} MiB ({rows:6d} cells, {n_state:3d} layers, "
                f"{s.sequences:2d} seqs), R (f32): {r:7.2f} MiB, S (f32): {m:7.2f} MiB"
            )
        return tuple(found)

    def details(self) -> tuple[tuple[str, str], ...]:
        full, window = self.cells(self.settings.sequences, self.settings.context_tokens)
        extra = f"; window {window:,} = window {self.window} + micro-batch, padded" if window else ""
        return (("cells of a stream", f"{full:,}{extra}"), ("streams", f"{self.streams(self.settings.sequences)}"))


def resolve(settings: Settings, dtype: str) -> Settings:
    """Fill in llama.cpp's defaults: an f16 cache whatever the weights are."""
    s = settings
    mla = s.mla or ("expanded" if s.version.before(*MLA) else "latent")
    return replace(
        s,
        kv_k=s.kv_k if s.kv_k not in (None, "auto") else "f16",
        kv_v=s.kv_v if s.kv_v not in (None, "auto") else (s.kv_k if s.kv_k not in (None, "auto") else "f16"),
        batched_tokens=s.batched_tokens or UBATCH,
        unified=bool(s.unified),
        mla=mla,
    )


FLAGS = (
    Flag(("-c", "--ctx-size"), "total_context", parse_tokens),
    Flag(("-np", "--parallel"), "sequences", int),
    Flag(("-ub", "--ubatch-size"), "batched_tokens", parse_tokens),
    Flag(("-ctk", "--cache-type-k"), "kv_k", str),
    Flag(("-ctv", "--cache-type-v"), "kv_v", str),
    Flag(("-kvu", "--kv-unified"), "unified", const=True),
    Flag(("-no-kvu", "--no-kv-unified"), "unified", const=False),
    Flag(("--swa-full",), "window_full", const=True),
    Flag(("--draft-max", "--draft"), "draft_tokens", int),
    Flag(("-mla", "--mla-use"), "mla", lambda text: "latent+kv" if text == "1" else "latent"),
)

PROFILE = Profile(
    name="llama.cpp",
    flags=FLAGS,
    cache=LlamaCppCache,
    resolve=resolve,
    budget="all",
    fraction=1.0,
    margin_bytes=GIB,
    runtime_bytes=(200 * MIB, 600 * MIB),
)
