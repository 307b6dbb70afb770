"""How each format stores one side (K or V) of blocks: the specification of `seal` and `decode`.

Everything here works on sides seen as tokens x channels: x [..., B, n]; held [..., B] bool says which slots hold a
token. Slots that hold nothing count for no scale and get code 0, so whatever stood there never leaves it. A NaN makes
the scale that it counts for a NaN, so that all that is read by that scale is one too: it is never hidden. What is too
large, an infinity too, becomes the largest number that the format can say there; in a rotated format, where all
channels would show it, an infinity makes the token NaNs, as do numbers beyond about 1e19.

Packed codes stand in stripes of s elements of a row (32; 16 or 8 where the row does not divide by it). With 4 bits
element i of a stripe is in byte i % (s/2), shifted by 4 * (i // (s/2)); with 2 bits in byte i % (s/4), shifted by
2 * (i // (s/4)); with 3 bits the two low bits as for 2, followed by s/8 bytes of high bits: byte i % (s/8), bit
i // (s/8).
So a vector of neighbouring elements unpacks with one shift and one mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.formats import Format

HALF_MAX, FP8_MAX = 65504.0, 448.0

# Centroids of the Lloyd-Max quantizer of N(0, 1): J. Max, "Quantizing for minimum distortion", 1960, table I.
GAUSS_CENTROIDS = {
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    2: (0.4528, 1.5104),
}


def encode(fmt: Format, x: Tensor, held: Tensor, *, tokens_in_row: bool) -> tuple[Tensor, ...]:
    """x [..., B, n] float -> the tensors of the side's layout (K's rows are channels: tokens_in_row)."""
    codec = _codec(fmt)
    wide = x.to(torch.float32) if x.dtype != torch.float64 else x
    return codec.encode(wide.masked_fill(~held[..., None], 0.0), held, tokens_in_row)


def decode(fmt: Format, stored: Sequence[Tensor], dtype: torch.dtype, *, tokens_in_row: bool) -> Tensor:
    """The tensors of a side -> x [..., B, n] of `dtype` (float32 or float64)."""
    return _codec(fmt).decode(tuple(stored), dtype, tokens_in_row)


@dataclass(frozen=True)
class FloatCodec:
    """Elements as they are; limit: where a narrow type saturates."""

    dtype: torch.dtype
    limit: float | None = None

    def encode(self, x: Tensor, held: Tensor, tokens_in_row: bool) -> tuple[Tensor, ...]:
        x = x if self.limit is None else x.clamp(-self.limit, self.limit)
        return (_rows(x, tokens_in_row).to(self.dtype),)

    def decode(self, stored: tuple[Tensor, ...], dtype: torch.dtype, tokens_in_row: bool) -> Tensor:
        return _rows(stored[0].to(dtype), tokens_in_row)


@dataclass(frozen=True)
class Int8Codec:
    """x = code * scale, one scale a token: its largest magnitude over 127. Error at most 0.57 scale."""

    def encode(self, x: Tensor, held: Tensor, tokens_in_row: bool) -> tuple[Tensor, ...]:
        scale = (x.abs().amax(-1) / 127.0).clamp(max=HALF_MAX).to(torch.float16)
        codes = _divide(x, scale[..., None].to(x.dtype)).round().clamp(-127, 127)
        return _rows(codes, tokens_in_row).to(torch.int8), scale

    def decode(self, stored: tuple[Tensor, ...], dtype: torch.dtype, tokens_in_row: bool) -> Tensor:
        codes, scale = stored
        return _rows(codes.to(dtype), tokens_in_row) * scale[..., None].to(dtype)


@dataclass(frozen=True)
class AffineCodec:
    """x = code * scale + zero (KIVI, Liu et al. 2024, section 3.1): keys share both a channel over the block's tokens,
    values a token over a group of channels."""

    bits: int

    def encode(self, x: Tensor, held: Tensor, tokens_in_row: bool) -> tuple[Tensor, ...]:
        grouped = x if tokens_in_row else x.unflatten(-1, (-1, _value_group(x.shape[-1])))
        axis = -2 if tokens_in_row else -1
        seen = held[..., None] if tokens_in_row else held[..., None, None]
        low = grouped.masked_fill(~seen, torch.inf).amin(axis, keepdim=True)
        high = grouped.masked_fill(~seen, -torch.inf).amax(axis, keepdim=True)
        empty = low > high
        low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
        top = 2**self.bits - 1
        span = (high - low).masked_fill(high == low, 0.0)  # two infinities have no distance
        scale = (span / top).clamp(max=HALF_MAX).to(torch.float16)
        zero = low.clamp(-HALF_MAX, HALF_MAX).to(torch.float16)
        codes = _divide(grouped - zero.to(x.dtype), scale.to(x.dtype)).round().clamp(0, top).masked_fill(~seen, 0.0)
        codes = codes if tokens_in_row else codes.flatten(-2)
        return pack(_rows(codes, tokens_in_row), self.bits), scale.squeeze(axis), zero.squeeze(axis)

    def decode(self, stored: tuple[Tensor, ...], dtype: torch.dtype, tokens_in_row: bool) -> Tensor:
        codes, scale, zero = stored
        x = _rows(unpack(codes, self.bits).to(dtype), tokens_in_row)
        if tokens_in_row:
            return x * scale[..., None, :].to(dtype) + zero[..., None, :].to(dtype)
        grouped = x.unflatten(-1, (scale.shape[-1], -1))
        return (grouped * scale[..., None].to(dtype) + zero[..., None].to(dtype)).flatten(-2)


@dataclass(frozen=True)
class TurboCodec:
    """Rotate a token's channels (signs, then Hadamard: QuaRot, Ashkboos et al. 2024), so that they look Gaussian; take
    the nearest centroid of each over their root mean square (TurboQuant, Zandieh et al. 2025); fit the token's one
    scale by least squares."""

    bits: int

    def encode(self, x: Tensor, held: Tensor, tokens_in_row: bool) -> tuple[Tensor, ...]:
        turned = rotate(x)
        rms = turned.square().mean(-1, keepdim=True).sqrt()
        centroids = _centroids(self.bits, x)
        edges = (centroids[1:] + centroids[:-1]) / 2
        codes = torch.bucketize((turned / rms.clamp_min(torch.finfo(x.dtype).tiny)).contiguous(), edges)
        levels = centroids[codes]
        scale = (turned * levels).sum(-1) / levels.square().sum(-1)
        silent = ~held | (rms[..., 0] == 0)
        scale = scale.clamp(0.0, HALF_MAX).masked_fill(silent, 0.0).masked_fill(~rms[..., 0].isfinite(), torch.nan)
        scale = scale.to(torch.float16)
        codes = codes.masked_fill(silent[..., None], 0)
        return pack(_rows(codes, tokens_in_row), self.bits), scale

    def decode(self, stored: tuple[Tensor, ...], dtype: torch.dtype, tokens_in_row: bool) -> Tensor:
        codes, scale = stored
        levels = _centroids(self.bits, scale.to(dtype))[_rows(unpack(codes, self.bits), tokens_in_row).long()]
        return unrotate(levels * scale[..., None].to(dtype))


def rotate(x: Tensor) -> Tensor:
    """x [..., n] times fixed signs, then an orthonormal Hadamard transform over spans of the largest power of two that
    divides n. Dot products of two rotated vectors are those of the vectors."""
    return hadamard(x * _signs(x))


def unrotate(x: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    return hadamard(x) * _signs(x)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Hadamard transform of x [..., n] over spans of the largest power of two in n; its own inverse."""
    n = x.shape[-1]
    span = n & -n
    y, half = x.reshape(*x.shape[:-1], -1, span), 1
    while half < span:
        pairs = y.unflatten(-1, (-1, 2, half))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return y.reshape(x.shape) * span**-0.5


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes [..., n] integers below 2**bits -> uint8 [..., n * bits / 8]; n a multiple of 8. Order as above."""
    striped = codes.to(torch.int32).unflatten(-1, (-1, _stripe(codes.shape[-1])))
    planes = (_field(striped, 4),) if bits == 4 else (_field(striped & 3, 2),)
    if bits == 3:
        planes = (*planes, _field(striped >> 2, 1))
    return torch.cat(planes, dim=-1).flatten(-2).to(torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: int32 [..., n]."""
    n = packed.shape[-1] * 8 // bits
    stripe = _stripe(n)
    striped = packed.to(torch.int32).unflatten(-1, (-1, stripe * bits // 8))
    if bits != 3:
        return _spread(striped, bits).flatten(-2)
    low, high = striped.split((stripe // 4, stripe // 8), dim=-1)
    return (_spread(low, 2) | (_spread(high, 1) << 2)).flatten(-2)


def _field(x: Tensor, bits: int) -> Tensor:
    """[..., s] -> bytes [..., s * bits / 8]."""
    per_byte = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=x.device)
    return (x.unflatten(-1, (per_byte, -1)) << shifts[:, None]).sum(-2)


def _spread(x: Tensor, bits: int) -> Tensor:
    """Bytes [..., m] -> [..., m * 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=x.device)
    return ((x[..., None, :] >> shifts[:, None]) & (2**bits - 1)).flatten(-2)


def _stripe(n: int) -> int:
    return next(s for s in (32, 16, 8) if n % s == 0)


def _value_group(n: int) -> int:
    return next(s for s in (32, 16, 8) if n % s == 0)


def _signs(x: Tensor) -> Tensor:
    """+-1 [n], fixed: bit 16 of a multiplicative hash of the channel (Knuth, TAOCP 3, 6.4)."""
    index = torch.arange(x.shape[-1], dtype=torch.int64, device=x.device)
    return 1.0 - 2.0 * (((index * 0x9E3779B1 + 0x7F4A7C15) >> 16) & 1).to(x.dtype)


def _centroids(bits: int, like: Tensor) -> Tensor:
    half = torch.tensor(GAUSS_CENTROIDS[bits], dtype=torch.float32, device=like.device).to(like.dtype)
    return torch.cat((-half.flip(0), half))


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale > 0, x / scale, 0.0)


def _rows(x: Tensor, tokens_in_row: bool) -> Tensor:
    """tokens x channels <-> the layout's rows."""
    return x.transpose(-1, -2) if tokens_in_row else x


_CODECS: dict[str, FloatCodec | Int8Codec | AffineCodec | TurboCodec] = {
    "float64": FloatCodec(torch.float64),
    "float32": FloatCodec(torch.float32),
    "bfloat16": FloatCodec(torch.bfloat16),
    "float16": FloatCodec(torch.float16),
    "fp8_e4m3": FloatCodec(torch.float8_e4m3fn, limit=FP8_MAX),
    "int8": Int8Codec(),
    **{f"int{bits}": AffineCodec(bits) for bits in (4, 3, 2)},
    **{f"turbo{bits}": TurboCodec(bits) for bits in (4, 3, 2)},
}


def _codec(fmt: Format) -> FloatCodec | Int8Codec | AffineCodec | TurboCodec:
    if fmt.name not in _CODECS:
        raise IncompatiblePlan(f"no codec for KV format {fmt.name!r}; there are {', '.join(_CODECS)}")
    return _CODECS[fmt.name]
