"""vLLM: pages of one size shared by all layer groups.

Storage (v1/core/kv_cache_utils.py, v1/kv_cache_interface.py, docs/design/hybrid_kv_cache_manager.md): layers of one
kind form groups of equal size, the last padded; page sizes are made equal by growing a block; an attention block
grows until its page holds a recurrent state. Reporting changed apart from storage: up to 0.20 the token line is
blocks // groups x block, from 0.21 it is blocks / blocks of one longest request x max_model_len.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.planner.profiles.base import (
    EngineCache,
    Figure,
    Flag,
    Profile,
    Split,
    add,
    ceil_div,
    pad,
    served_dtype,
    state_bytes,
    token_bytes,
)
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import GIB, MIB, parse_size, parse_tokens

HYBRID = ((0, 9, 2), (2025, 7))  # windows get groups of their own
MLA = ((0, 7, 0), (2025, 1))  # latents are cached as latents
ENGINE_V1 = ((0, 9, 0), (2025, 5))  # no CPU pool any more
ALIGN = ((0, 20, 0), (2026, 4))  # prefix caching on hybrids is on unless drafts are
NEW_TOKENS = ((0, 21, 0), (2026, 5))
PADDED_HEAD = 256


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table. layers: real ones. block_tokens: tokens of a block; 0 for states."""

    kind: str
    token: Split
    state: int
    window: int | None
    layers: int
    block_tokens: int


class VllmCache(EngineCache):
    """One rank of vLLM. `page` is the bytes of one block for one layer; a block takes `page * width`."""

    def __init__(self, layers: Sequence[LayerSpec], settings: Settings) -> None:
        super().__init__(layers, settings)
        kinds = Counter(key for spec in self.layers for key in self._kinds(spec))
        drafted = next((k for k in kinds if k[0] == "full"), None) if settings.draft_layers else None
        if drafted:
            kinds[drafted] += settings.draft_layers
        self.block_tokens = settings.block_size or 16
        attention = {k: n for k, n in kinds.items() if k[0] != "state"}
        if len({(k[0], k[3]) for k in kinds}) <= 1 and attention:
            self._uniform(attention)
        elif kinds:
            self._mixed(kinds)
        else:
            self.page, self.width, self.groups = 1, 1, ()

    def _kinds(self, spec: LayerSpec) -> list[tuple[str, Split, int, int | None]]:
        """What one layer keeps: (kind, bytes a token, bytes a state, window) for attention, for state, or both."""
        s, found = self.settings, []
        if spec.kind in (LayerKind.ATTENTION, LayerKind.LATENT):
            expanded = spec.kind is LayerKind.LATENT and (s.mla == "expanded" or s.version.before(*MLA))
            if expanded:
                heads = replace(
                    spec, latent_dim=0, rope_dim=0, kv_heads=spec.query_heads, k_dim=PADDED_HEAD, v_dim=PADDED_HEAD
                )
                spec = heads
            windowed = spec.window_tokens and not s.window_full and not s.version.before(*HYBRID)
            found.append(
                ("sliding" if windowed else "full", token_bytes(spec, s), 0, spec.window_tokens if windowed else None)
            )
        if spec.state:
            wide = 2 if s.state_dtype in ("bfloat16", "float16") else 4
            nbytes = sum(
                state_bytes(t, conv_dtype_bytes=2, state_dtype_bytes=wide, draft_tokens=s.draft_tokens)
                for t in spec.state
            )
            found.append(("state", Split(), nbytes, None))
        return found

    def _uniform(self, kinds: dict) -> None:
        """One kind of layer: one group; a block takes its bytes in every layer, whatever their head counts."""
        self.groups = tuple(Group(k, t, 0, w, n, self.block_tokens) for (k, t, _, w), n in kinds.items())
        self.page, self.width = self.block_tokens * sum(g.token.total * g.layers for g in self.groups), 1
        self._one_table = True

    def _mixed(self, kinds: Counter) -> None:
        """Several kinds: groups of equal width, pages of equal size."""
        self._one_table = False
        states = max((k[2] for k in kinds), default=0)
        widest = max((k[1].total for k in kinds), default=0)
        if states and widest:
            grain = self.settings.kernel_tokens or 16
            self.block_tokens = max(self.block_tokens, pad(ceil_div(states, widest), grain))
        self.page = max(self.block_tokens * widest, states)
        counts = list(kinds.values())
        self.width = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
        groups = []
        for (kind, token, state, window), n in kinds.items():
            tokens = self.page // token.total if token.total else 0
            for i in range(ceil_div(n, self.width)):
                members = ceil_div(n - i, ceil_div(n, self.width))
                groups.append(Group(kind, token, state, window, members, tokens))
        self.groups = tuple(groups)

    @property
    def block_bytes(self) -> int:
        return self.page * self.width

    def _group_blocks(self, group: Group, tokens: int) -> int:
        """Blocks that one request of so many tokens may hold in one group."""
        s = self.settings
        if group.kind == "state":
            if s.state_mode == "all":
                return ceil_div(tokens, self.block_tokens)
            return (2 if s.state_mode == "align" else 1) + s.draft_tokens
        if group.window is None:
            return ceil_div(tokens, group.block_tokens)
        in_flight = (s.batched_tokens or 0) * (2 if s.async_scheduling else 1)
        return ceil_div(min(group.window - 1 + in_flight, tokens), group.block_tokens) + 1

    def request_blocks(self, tokens: int) -> int:
        """Blocks that one request of so many tokens may hold, over all groups."""
        groups = self.groups[:1] if self._one_table else self.groups
        return sum(self._group_blocks(g, tokens) for g in groups) if self.groups else 0

    def held(self, sequences: int, tokens: int) -> Split:
        """Whole blocks, in proportion to what their pages hold; padding counts as K and V alike."""
        total = sequences * self.request_blocks(tokens) * self.block_bytes
        if self._one_table:
            token = add([g.token.times(g.layers) for g in self.groups])
            v = total * token.v // max(1, token.total)
            return Split(total - v, v)
        v = state = 0
        for g in self.groups:
            nbytes = sequences * self._group_blocks(g, tokens) * self.block_bytes
            if g.kind == "state":
                state += nbytes
            else:
                v += nbytes * g.token.v // max(1, g.token.total)
        return Split(total - v - state, v, state)

    def growth(self) -> Split:
        growing = [g for g in self.groups if g.kind == "full"]
        if self._one_table:
            return add([g.token.times(g.layers) for g in growing])
        return add([g.token.times(self.width) for g in growing])

    def blocks(self, available: int) -> int:
        return available // self.block_bytes

    def tokens(self, available: int) -> int:
        blocks, length = self.blocks(available), self.settings.context_tokens
        tables = 1 if self._one_table else max(1, len(self.groups))
        if self.settings.version.before(*NEW_TOKENS):
            smallest = min((g.block_tokens for g in self.groups if g.block_tokens), default=self.block_tokens)
            return blocks // tables * smallest
        return int(blocks / max(1, self.request_blocks(length)) * length)

    def concurrency(self, available: int, tokens: int) -> float:
        if self.settings.version.before(*HYBRID):
            return self.blocks(available) * self.block_tokens / tokens
        return self.blocks(available) / max(1, self.request_blocks(tokens))

    def figures(self, available: int) -> tuple[Figure, ...]:
        s, length = self.settings, self.settings.context_tokens
        blocks, tokens, at_once = self.blocks(available), self.tokens(available), self.concurrency(available, length)
        needed = self.held(1, length).total
        found = [
            Figure("blocks", blocks, "blocks", f"{blocks}"),
            Figure("tokens", tokens, "tokens", f"{tokens:,}"),
            Figure("concurrency", at_once, "x", f"{at_once:.2f}", 0.01),
            Figure("available", available, "GiB", f"{available / GIB:.2f}", 0.01 * GIB),
            Figure("needed", needed, "GiB", f"{needed / GIB:.2f}", 0.01 * GIB),
            Figure("estimated_length", self.longest(available, 1), "tokens", f"{self.longest(available, 1)}"),
            Figure("block_tokens", self.block_tokens, "tokens", f"{self.block_tokens}"),
        ]
        windows = [self._group_blocks(g, length) for g in self.groups if g.window is not None]
        if windows:
            found.append(Figure("window_blocks", windows[0], "blocks", f"{windows[0]}"))
        if s.version.before(*ENGINE_V1):
            swap = (s.swap_bytes or 4 * GIB) // self.block_bytes
            found.append(Figure("cpu_blocks", swap, "blocks", f"{swap}"))
        return tuple(found)

    def lines(self, available: int) -> tuple[str, ...]:
        f = {x.name: x.text for x in self.figures(available)}
        length = self.settings.context_tokens
        if self.settings.version.before(*ENGINE_V1):
            return (
                f"# GPU blocks: {f['blocks']}, # CPU blocks: {f['cpu_blocks']}",
                f"Maximum concurrency for {length} tokens per request: {f['concurrency']}x",
            )
        if self.held(1, length).total > available:
            return (
                f"To serve at least one request with the models's max seq len ({length}), ({f['needed']} GiB KV cache "
                f"is needed, which is larger than the available KV cache memory ({f['available']} GiB). Based on the "
                f"available memory, the estimated maximum model length is {f['estimated_length']}.",
            )
        return (
            f"Available KV cache memory: {f['available']} GiB",
            f"GPU KV cache size: {f['tokens']} tokens",
            f"Maximum concurrency for {length:,} tokens per request: {f['concurrency']}x",
        )

    def details(self) -> tuple[tuple[str, str], ...]:
        tables = 1 if self._one_table else len(self.groups)
        return (
            ("block", f"{self.block_tokens} tokens"),
            ("block bytes", f"{self.block_bytes:,} B = page {self.page:,} B x {self.width} layers of a group"),
            ("groups", f"{tables}: " + ", ".join(f"{g.layers} x {g.kind}" for g in self.groups)),
        )

    def notes(self) -> tuple[str, ...]:
        padding = sum(self.width - g.layers for g in self.groups) if not self._one_table else 0
        return (f"vLLM pads the groups with {padding} layers that hold nothing",) if padding else ()


def resolve(settings: Settings, dtype: str) -> Settings:
    """Fill in vLLM's defaults."""
    s = settings
    kv = served_dtype(dtype) if s.kv_k in ("auto", None) else s.kv_k
    align = not s.version.before(*ALIGN) and s.prefix_caching is not False and not s.draft_tokens
    return replace(
        s,
        kv_k=kv,
        kv_v=kv if s.kv_v in ("auto", None) else s.kv_v,
        batched_tokens=s.batched_tokens or 8192,
        state_mode=s.state_mode or ("align" if align else "none"),
        async_scheduling=bool(s.async_scheduling),
    )


def _fraction(text: str) -> float:
    return float(text)


PROFILE = Profile(
    name="vllm",
    flags=(
        Flag(("--max-model-len",), "context_tokens", parse_tokens),
        Flag(("--max-num-seqs",), "sequences", int),
        Flag(("--max-num-batched-tokens",), "batched_tokens", parse_tokens),
        Flag(("--gpu-memory-utilization",), "memory_fraction", _fraction),
        Flag(("--kv-cache-dtype",), "kv_k", str),
        Flag(("--block-size",), "block_size", int),
        Flag(("--tensor-parallel-size", "-tp"), "tp", int),
        Flag(("--pipeline-parallel-size", "-pp"), "pp", int),
        Flag(("--data-parallel-size", "-dp"), "dp", int),
        Flag(("--kv-cache-memory-bytes", "--kv-cache-memory"), "kv_memory_bytes", parse_size),
        Flag(("--swap-space",), "swap_bytes", lambda text: int(float(text) * GIB)),
        Flag(("--num-speculative-tokens",), "draft_tokens", int),
        Flag(("--mamba-cache-mode",), "state_mode", str),
        Flag(("--mamba-ssm-cache-dtype",), "state_dtype", str),
        Flag(("--enable-prefix-caching",), "prefix_caching", const=True),
        Flag(("--no-enable-prefix-caching",), "prefix_caching", const=False),
        Flag(("--async-scheduling",), "async_scheduling", const=True),
        Flag(("--no-async-scheduling",), "async_scheduling", const=False),
        Flag(("--disable-hybrid-kv-cache-manager",), "window_full", const=True),
        Flag(("--enforce-eager",), "graphs", const=False),
        Flag(("--dtype",), "weights", str),
    ),
    cache=VllmCache,
    resolve=resolve,
    budget="total",
    fraction=0.9,
    runtime_bytes=(50 * MIB, 1200 * MIB),
    graph_bytes=(200 * MIB, 2 * GIB),
)
