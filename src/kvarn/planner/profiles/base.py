"""What an engine profile is. Storage rules (what is reserved) stand apart from reporting rules (what is printed)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.core.specs import LayerKind, LayerSpec, StateTensor
from kvarn.planner.formats import latent_row, row_format
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import MAX_TOKENS

MAX_SEQUENCES = 2**24


@dataclass(frozen=True, slots=True)
class Split:
    """Cache bytes by what they hold. k counts MLA latents and indexer keys as well: they are all key-side."""

    k: int = 0
    v: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        return self.k + self.v + self.state

    def __add__(self, other: Split) -> Split:
        return Split(self.k + other.k, self.v + other.v, self.state + other.state)

    def times(self, n: int) -> Split:
        return Split(self.k * n, self.v * n, self.state * n)


def add(splits: Sequence[Split]) -> Split:
    """The sum of several."""
    return Split(sum(s.k for s in splits), sum(s.v for s in splits), sum(s.state for s in splits))


@dataclass(frozen=True, slots=True)
class Figure:
    """One number an engine prints. text: as it prints it; unit: '', 'tokens', 'blocks', 'GiB', 'MiB', 'x'.
    step: what one unit of the last printed digit is worth."""

    name: str
    value: float
    unit: str
    text: str
    step: float = 1.0


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of an engine: its spellings, the Settings field it sets, how its text is read."""

    names: tuple[str, ...]
    field: str
    read: Callable[[str], Any] = str
    const: Any = None  # for flags that take no value


class EngineCache(ABC):
    """The cache of one rank in one engine. Everything in integer bytes.

    layers: the rank's layer specs; settings: what was asked, with the engine's defaults filled in."""

    def __init__(self, layers: Sequence[LayerSpec], settings: Settings) -> None:
        self.layers = tuple(layers)
        self.settings = settings

    @abstractmethod
    def held(self, sequences: int, tokens: int) -> Split:
        """Bytes reserved when that many sequences have that many tokens each. Never falls when either grows."""

    @abstractmethod
    def growth(self) -> Split:
        """Bytes that one more token of one sequence adds once every window is full."""

    def blocks(self, available: int) -> int | None:
        """Blocks that fit in `available` bytes; None where the engine has no blocks."""
        return None

    def tokens(self, available: int) -> int:
        """Tokens that fit, counted as the engine counts them."""
        return self.longest(available, 1)

    def concurrency(self, available: int, tokens: int) -> float:
        """Sequences of that length that fit at once."""
        return float(_largest(lambda n: self.held(n, tokens).total <= available, MAX_SEQUENCES))

    def longest(self, available: int, sequences: int) -> int:
        """The longest length that so many sequences can all have; 0: not one token."""
        return _largest(lambda n: self.held(sequences, n).total <= available, MAX_TOKENS)

    def figures(self, available: int) -> tuple[Figure, ...]:
        """What the engine prints about its cache, given the memory it has for it."""
        return ()

    def figures_at(self, tokens: int) -> tuple[Figure, ...]:
        """The same given the tokens that it counts, where that decides its figures; () where it does not."""
        return ()

    def lines(self, available: int) -> tuple[str, ...]:
        """The engine's log lines with these figures."""
        return ()

    def notes(self) -> tuple[str, ...]:
        """What was assumed about the engine, in words."""
        return ()

    def details(self) -> tuple[tuple[str, str], ...]:
        """Intermediate figures worth explaining: block size, pages, groups."""
        return ()


@dataclass(frozen=True)
class Profile:
    """One engine. defaults: Settings fields that it fills in when they are None. cache: builds a rank's cache.

    budget: how the memory for the cache follows from the device: 'total' (a share of all memory, less everything
    else: vLLM), 'static' (a share of all memory for weights and cache: SGLang), 'free' (a share of what is free once
    weights are loaded: TensorRT-LLM, Kvarn), 'all' (what is left, less a margin: llama.cpp)."""

    name: str
    flags: tuple[Flag, ...]
    cache: Callable[[Sequence[LayerSpec], Settings], EngineCache]
    resolve: Callable[[Settings, str], Settings]
    budget: str
    fraction: float
    margin_bytes: int = 0
    runtime_bytes: tuple[int, int] = (0, 0)
    graph_bytes: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()


def token_bytes(spec: LayerSpec, settings: Settings) -> Split:
    """Bytes a token of one rank's layer in the asked formats (row formats; Kvarn's own go by blocks)."""
    k, v = settings.kv_k or "bf16", settings.kv_v or settings.kv_k or "bf16"
    index = index_bytes(spec)
    if spec.kind is LayerKind.LATENT:
        return Split(k=latent_row(k, spec.latent_dim, spec.rope_dim) + index)
    if spec.kind is not LayerKind.ATTENTION:
        return Split()
    return Split(k=row_format(k).row(spec.kv_heads, spec.k_dim) + index, v=row_format(v).row(spec.kv_heads, spec.v_dim))


def served_dtype(dtype: str) -> str:
    """The number type that GPU engines run a model in: float32 checkpoints are served in float16."""
    return "f16" if dtype == "float32" else dtype


def index_bytes(spec: LayerSpec) -> int:
    """A sparse indexer's key: one fp8 a number and one float32 scale per 128 of them (DeepSeek-V3.2)."""
    return spec.index_dim + 4 * -(-spec.index_dim // 128)


def state_bytes(tensor: StateTensor, *, conv_dtype_bytes: int, state_dtype_bytes: int, draft_tokens: int = 0) -> int:
    """Bytes of one sequence's state tensor in an engine's own dtypes; convolution state keeps a column more a draft
    token where the engine rolls drafts back that way."""
    if tensor.columns:
        return tensor.elements // tensor.columns * (tensor.columns + draft_tokens) * conv_dtype_bytes
    return tensor.elements * (conv_dtype_bytes if "conv" in tensor.name else state_dtype_bytes)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def pad(n: int, multiple: int) -> int:
    """n rounded up to a multiple."""
    return ceil_div(n, multiple) * multiple


def _largest(fits: Callable[[int], bool], ceiling: int) -> int:
    """The largest n <= ceiling that fits, given that all smaller ones do too; 0 if not even 1."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < ceiling and fits(high):
        low, high = high, high * 2
    high = min(high, ceiling)
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
