"""Weights as small codes with scales: read from ggml's quantized blocks as they are, or made by rounding numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.kernels.api import Codes
from kvarn.models.weights.base import RawBlocks

BLOCK_COLUMNS, WIDE_COLUMNS = 32, 128
TINY = 1e-7  # the smallest scale that half precision holds with some digits


def codes_of(raw: RawBlocks) -> Codes | None:
    """The blocks' own codes, exact but for the scales of k-quants, which are products rounded to half precision, and
    for offsets, see `_from_least`. None for types that have no such form (groups of 16, or fewer bits than 4)."""
    read = _READERS.get(raw.type)
    return read(raw.data) if read else None


def _scales(blocks: Tensor, at: int) -> Tensor:
    """A half-precision number of each block. blocks [N, blocks, bytes] uint8 -> [N, blocks] float16."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _halves(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2 n]: the low halves, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[..., 4] bytes of 32 bits -> [..., 32], each 0 or 16."""
    return ((packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2) << 4


def _from_least(codes: Tensor, scale: Tensor, least: Tensor, bits: int, middle: int) -> Codes:
    """Codes that count from `least`, as an offset from the code `middle` instead. That offset is small, since weights
    lie on both sides of 0; in bfloat16 it is off by 2^-9 of itself at most, below a hundredth of a step."""
    offset = (least.float() + middle * scale.float()).bfloat16()
    return Codes(codes + ((1 << (bits - 1)) - middle), scale, offset, bits)


def _q4_0(data: Tensor) -> Codes:
    blocks = data.unflatten(1, (-1, 18))
    return Codes(_halves(blocks[..., 2:]).flatten(1), _scales(blocks, 0), None, 4)


def _q4_1(data: Tensor) -> Codes:
    blocks = data.unflatten(1, (-1, 20))
    return _from_least(_halves(blocks[..., 4:]).flatten(1), _scales(blocks, 0), _scales(blocks, 2), 4, 8)


def _q5_0(data: Tensor) -> Codes:
    blocks = data.unflatten(1, (-1, 22))
    codes = _halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Codes(codes.flatten(1) + 112, _scales(blocks, 0), None, 8)


def _q5_1(data: Tensor) -> Codes:
    blocks = data.unflatten(1, (-1, 24))
    codes = _halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _from_least(codes.flatten(1), _scales(blocks, 0), _scales(blocks, 2), 8, 16)


def _q8_0(data: Tensor) -> Codes:
    blocks = data.unflatten(1, (-1, 34))
    return Codes((blocks[..., 2:] ^ 128).flatten(1), _scales(blocks, 0), None, 8)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of the eight blocks of 32 in each super-block of Q4_K and Q5_K, [N, blocks] float16 each."""
    packed = blocks[..., 4:16]
    first, second, third = packed.split(4, dim=-1)
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1).float()
    least = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1).float()
    d, d_least = (_scales(blocks, at).float().unsqueeze(-1) for at in (0, 2))
    return (d * scale).half().flatten(1), (-d_least * least).half().flatten(1)


def _q4_k(data: Tensor) -> Codes:
    blocks = data.unflatten(1, (-1, 144))
    codes = _halves(blocks[..., 16:].unflatten(-1, (4, 32)))
    return _from_least(codes.flatten(1), *_k_scales(blocks), 4, 8)


def _q5_k(data: Tensor) -> Codes:
    blocks = data.unflatten(1, (-1, 176))
    low = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32))
    bits = torch.arange(8, dtype=torch.uint8).view(4, 2, 1)
    high = ((blocks[..., 16:48].unsqueeze(-2).unsqueeze(-2) >> bits) & 1) << 4
    return _from_least((low | high).flatten(1), *_k_scales(blocks), 8, 16)


_READERS: dict[str, Callable[[Tensor], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}


def round_to_4_bits(weight: Tensor) -> Codes:
    """weight [N, K] float32 -> 16 even steps from the least to the greatest number of each 32 columns."""
    parts = parts_of(weight, BLOCK_COLUMNS)
    least, most = parts.amin(-1), parts.amax(-1)
    scale = ((most - least) / 15).clamp_min(TINY).half()
    offset = (least + 8 * scale.float()).bfloat16()
    codes = torch.round((parts - offset.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)) + 8
    return Codes(codes.clamp(0, 15).to(torch.uint8).flatten(1), scale, offset, 4)


def round_to_8_bits(weight: Tensor, group: int | None = BLOCK_COLUMNS) -> Codes:
    """weight [N, K] float32 -> even steps on both sides of 0, the largest magnitude of each `group` columns (None: of
    all) becoming 127."""
    parts = parts_of(weight, group)
    scale = (parts.abs().amax(-1) / 127).clamp_min(TINY).half()
    codes = torch.round(parts / scale.float().unsqueeze(-1)).clamp(-127, 127) + 128
    return Codes(codes.to(torch.uint8).flatten(1), scale, None, 8)


def wide_group(columns: int) -> int:
    """Columns that share a scale where many rows are multiplied: the most blocks up to WIDE_COLUMNS that divide a row.
    The work around scales then takes 8% of the products' instead of a third, and the error hardly grows; with a scale a
    row it does (perplexity +2.7% on SmolLM2-135M, whose activations have outliers)."""
    blocks = -(-columns // BLOCK_COLUMNS)
    return BLOCK_COLUMNS * max(n for n in range(1, WIDE_COLUMNS // BLOCK_COLUMNS + 1) if blocks % n == 0)


def wide_bytes(rows: int, columns: int) -> int:
    """What 8 bits with a scale each `wide_group` columns take."""
    padded = -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS
    return rows * (padded + 2 * padded // wide_group(columns))


def wide_groups(raw: RawBlocks | None, numbers: Callable[[], Tensor]) -> Codes:
    """8 bits with a scale each `wide_group` columns."""
    weight = numbers()
    return round_to_8_bits(weight, wide_group(weight.shape[1]))


def parts_of(weight: Tensor, group: int | None) -> Tensor:
    """[N, K] -> [N, groups, group], K filled up with zeros to whole blocks; group None: all columns."""
    missing = -weight.shape[1] % BLOCK_COLUMNS
    padded = F.pad(weight, (0, missing)) if missing else weight
    return padded.unflatten(1, (-1, group or padded.shape[1]))


def stack(parts: Sequence[Codes]) -> Codes:
    """Matrices of equal columns one below the other; where they differ, all take the wider form, losing nothing."""
    if len(parts) == 1:
        return parts[0]
    bits, offsets = max(p.bits for p in parts), any(p.offset is not None for p in parts)
    return Codes(
        torch.cat([p.codes + ((1 << (bits - 1)) - p.zero) for p in parts]),
        torch.cat([p.scale for p in parts]),
        torch.cat([_offset(p) for p in parts]) if offsets else None,
        bits,
    )


def _offset(held: Codes) -> Tensor:
    return torch.zeros_like(held.scale, dtype=torch.bfloat16) if held.offset is None else held.offset
