"""The kinds of quantized formats: what they store a block. Their arithmetic is `kvarn.kernels.reference.codecs`.

Scales and zero points are float16 and counted. Packed codes are uint8; how they are packed is said there too.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.formats import Format, TensorLayout

SCALE = "float16"
VALUE_GROUPS = (32, 16, 8)  # channels that share a scale; the largest that divides the head dim


def value_group(dim: int) -> int:
    """Channels of a token's values that share one scale and zero point. Raises IncompatiblePlan."""
    for size in VALUE_GROUPS:
        if dim % size == 0:
            return size
    raise IncompatiblePlan(
        f"a head of {dim} channels does not divide into groups of {VALUE_GROUPS[-1]}",
        fixes=("--kv int8", "--kv bfloat16"),
    )


@dataclass(frozen=True)
class QuantizedFormat(Format):
    """bits: of one code. Written whole when a block is sealed. A packed row of K holds several tokens a byte, so only
    whole bytes a code can be rewritten token by token."""

    lossless: bool = False
    rewritable: bool = False
    sealed_only: bool = True
    bits: int = 8

    def elements(self, stored: int) -> int:
        return stored * 8 // self.bits

    def _codes(self, side: str, rows: int, length: int) -> TensorLayout:
        """`rows` rows of `length` codes, packed along the row. Raises IncompatiblePlan unless they fill bytes."""
        if self.bits == 8:
            return TensorLayout(side, (rows, length), "int8", token_axis=1 if side == "k" else 0)
        if length % 8:
            what = "block size" if side == "k" else "head dim"
            raise IncompatiblePlan(
                f"{self.name} packs 8 codes together; a {what} of {length} is no multiple of 8",
                fixes=("--block-size 32", "--kv int8") if side == "k" else ("--kv int8",),
            )
        return TensorLayout(side, (rows, length * self.bits // 8), "uint8", token_axis=None if side == "k" else 0)


@dataclass(frozen=True)
class TokenScaled(QuantizedFormat):
    """One scale a token and head, for keys and values alike: attention folds the first into the score and the second
    into the softmax weight.

    A NaN in a token's keys or values makes its scale a NaN, and so all its channels: what attends to it becomes NaN. An
    infinity is stored as 127 times the largest scale, 65504, beside which the token's other channels are 0; in a
    rotated format, whose channels would all show it, it makes the token NaNs."""

    def k_layout(self, dim: int, block_size: int) -> tuple[TensorLayout, ...]:
        return (self._codes("k", dim, block_size), TensorLayout("k_scale", (block_size,), SCALE, token_axis=0))

    def v_layout(self, dim: int, block_size: int) -> tuple[TensorLayout, ...]:
        return (self._codes("v", block_size, dim), TensorLayout("v_scale", (block_size,), SCALE, token_axis=0))


@dataclass(frozen=True)
class Affine(QuantizedFormat):
    """KIVI (Liu et al. 2024, section 3): keys with a scale and zero point a channel over the block's tokens, values
    with one a token and group of channels. A block's keys share scales, so no single token can be rewritten.

    A NaN makes the scale and zero point that it shares NaNs: in values its token's group of channels, in keys its
    channel of the whole block, so that every query that reads the block becomes NaN. An infinity is stored as the
    largest number that zero point and scale, of 65504 at most, can say."""

    def k_layout(self, dim: int, block_size: int) -> tuple[TensorLayout, ...]:
        codes = self._codes("k", dim, block_size)
        return codes, TensorLayout("k_scale", (dim,), SCALE), TensorLayout("k_zero", (dim,), SCALE)

    def v_layout(self, dim: int, block_size: int) -> tuple[TensorLayout, ...]:
        groups = (block_size, dim // value_group(dim))
        codes = self._codes("v", block_size, dim)
        return codes, *(TensorLayout(name, groups, SCALE, token_axis=0) for name in ("v_scale", "v_zero"))
