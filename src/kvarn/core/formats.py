"""What a KV format is to the rest of the house: names, shapes and bytes. No torch here, so the planner can read it;
encode and decode are operations of `kvarn.kernels`.

A format describes one side (K or V) of one block of one layer and one KV head. Shape letters: D head dim, B block size.
K is laid out channel-major [D, B] so that a query multiplies whole rows of tokens; V is token-major [B, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvarn.core.registry import load, names_in
from kvarn.core.specs import ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor of a block: `shape` for one (layer, head); `dtype` a torch dtype's name. token_axis: the axis of
    `shape` along which each token has an entry of its own (needed to rewrite single tokens); None: they share."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    token_axis: int | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class Format:
    """One storage format.

    lossless: decoding gives back exactly what was written (float formats at their own precision count).
    rewritable: single tokens of a sealed block can be rewritten in place (token eviction needs it).
    sealed_only: blocks are written whole, from full precision, when they are sealed (quantized formats).
    """

    name: str
    lossless: bool
    rewritable: bool
    sealed_only: bool

    def k_layout(self, dim: int, block_size: int) -> tuple[TensorLayout, ...]:
        """Tensors of one block's keys for one layer and head."""
        raise NotImplementedError

    def v_layout(self, dim: int, block_size: int) -> tuple[TensorLayout, ...]:
        """Tensors of one block's values for one layer and head."""
        raise NotImplementedError

    def elements(self, stored: int) -> int:
        """How many numbers a row of `stored` elements of the first tensor holds (packed formats hold several each)."""
        return stored

    def k_block_bytes(self, dim: int, block_size: int) -> int:
        return sum(t.nbytes for t in self.k_layout(dim, block_size))

    def v_block_bytes(self, dim: int, block_size: int) -> int:
        return sum(t.nbytes for t in self.v_layout(dim, block_size))


@dataclass(frozen=True)
class FloatFormat(Format):
    """Numbers as they are, in one float type."""

    lossless: bool = True
    rewritable: bool = True
    sealed_only: bool = False

    def k_layout(self, dim: int, block_size: int) -> tuple[TensorLayout, ...]:
        return (TensorLayout("k", (dim, block_size), self.name, token_axis=1),)

    def v_layout(self, dim: int, block_size: int) -> tuple[TensorLayout, ...]:
        return (TensorLayout("v", (block_size, dim), self.name, token_axis=0),)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a block stores its keys and its values; the two may differ."""

    k: Format
    v: Format

    @property
    def name(self) -> str:
        return self.k.name if self.k.name == self.v.name else f"k={self.k.name},v={self.v.name}"

    @property
    def sealed_only(self) -> bool:
        return self.k.sealed_only or self.v.sealed_only

    @property
    def rewritable(self) -> bool:
        return self.k.rewritable and self.v.rewritable

    def block_bytes(self, k_dim: int, v_dim: int, block_size: int) -> int:
        """Bytes of one block for one layer and one KV head."""
        return self.k.k_block_bytes(k_dim, block_size) + self.v.v_block_bytes(v_dim, block_size)


def format_names() -> tuple[str, ...]:
    return names_in("kvarn.kv.formats")


def load_format(name: str) -> Format:
    """The format defined in the file `name`.py. Raises UnknownName."""
    return load("kvarn.kv.formats", name, "FORMAT", "KV format")


def parse_kv_format(text: str) -> KVFormat:
    """'bfloat16', or 'k=int8,v=int4'. Raises UnknownName for a format and ValueError for the form."""
    if "=" not in text:
        return KVFormat(k=load_format(text), v=load_format(text))
    sides = dict(part.strip().split("=", 1) for part in text.split(","))
    if set(sides) != {"k", "v"}:
        raise ValueError(f"KV format {text!r}; write one name, or k=NAME,v=NAME")
    return KVFormat(k=load_format(sides["k"]), v=load_format(sides["v"]))
