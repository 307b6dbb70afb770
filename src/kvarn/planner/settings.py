"""What was asked of an engine, in one vocabulary: every profile translates its own flags into these words."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvarn.core.errors import InvalidRequest
from kvarn.planner.version import Version

MAX_COUNT = 2**24


@dataclass(frozen=True, slots=True)
class Settings:
    """None: the engine's default.

    context_tokens: the length every sequence may reach. sequences: how many are resident at once. batch: how many are
    decoded in one step. kv_k, kv_v: KV formats. weights: weight format, None as stored. tp, pp, dp: parallel sizes.
    batched_tokens: tokens of one step at most (ubatch of llama.cpp). memory_fraction: share of the device (or of what
    is free) that the engine takes. kv_memory_bytes: the cache's memory of one rank, whatever the device.
    slots: sequences that have recurrent state (or llama.cpp's -np). draft_tokens, draft_layers: speculative decoding
    with the model's own draft layers. window_full: window layers keep the whole context. unified: sequences share
    one stream of cells. prefix_caching, async_scheduling, graphs: as the engine understands them. state_dtype: of
    recurrent (not convolution) state. state_mode: vLLM's mamba cache mode. kernel_tokens: what a block must be a
    multiple of. swap_bytes: CPU pool of old vLLM. residual_tokens: newest tokens in full precision.
    window_ratio: SGLang's tokens of the window pool for each of the full pool. mla: how latent layers are stored
    ('latent', 'expanded', 'latent+kv').
    """

    context_tokens: int
    sequences: int = 1
    batch: int = 1
    kv_k: str | None = None
    kv_v: str | None = None
    weights: str | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    block_size: int | None = None
    batched_tokens: int | None = None
    memory_fraction: float | None = None
    kv_memory_bytes: int | None = None
    slots: int | None = None
    draft_tokens: int = 0
    draft_layers: int = 0
    window_full: bool | None = None
    unified: bool | None = None
    prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    graphs: bool | None = None
    state_dtype: str | None = None
    state_mode: str | None = None
    kernel_tokens: int | None = None
    swap_bytes: int | None = None
    residual_tokens: int | None = None
    window_ratio: float | None = None
    mla: str | None = None
    version: Version = field(default_factory=Version)

    def __post_init__(self) -> None:
        for name in ("sequences", "batch", "tp", "pp", "dp"):
            _positive(name, getattr(self, name))
        for name in ("block_size", "batched_tokens", "slots", "kernel_tokens"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.context_tokens < 1:
            raise InvalidRequest(f"context is {self.context_tokens} tokens", fixes=("use at least 1",))
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise InvalidRequest(f"memory fraction is {self.memory_fraction}", fixes=("use more than 0 and at most 1",))
        for name in ("draft_tokens", "draft_layers"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}", fixes=("use 0 or more",))

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
        raise InvalidRequest(f"{name} is {value!r}", fixes=(f"use a whole number, 1 to {MAX_COUNT}",))
