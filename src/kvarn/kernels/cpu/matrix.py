"""Matrices of 4- and 8-bit codes, packed for the native kernels (csrc/product_data.h)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvarn.kernels._arena import Arena
from kvarn.kernels.api import Codes
from kvarn.kernels.cpu import _native
from kvarn.kernels.cpu.codes import ACTIVATIONS, DTYPES

TILE_ROWS, BLOCK_COLUMNS = 16, 32
TILES_AT_ONCE = 64
_AS_IS, _NORMED, _GATED = 0, 1, 2


def pack(held: Codes, arena: Arena | None = None) -> Tensor:
    """The tiles as the kernels read them, one row of bytes [ceil(N / 16), bytes] uint8 each; see csrc/product_data.h. A
    few tiles at a time, so that a large vocabulary's table is not copied several times on the way. arena: where they
    lie."""
    n_rows, columns = held.codes.shape
    tiles, groups = -(-n_rows // TILE_ROWS), held.scale.shape[1]
    sides = 1 if held.offset is None else 2
    tile_bytes = TILE_ROWS * (columns * held.bits // 8 + 2 * sides * groups)
    out = (arena or Arena(0)).take(tiles * tile_bytes).view(tiles, tile_bytes)
    for begin in range(0, tiles, TILES_AT_ONCE):
        rows = slice(begin * TILE_ROWS, (begin + TILES_AT_ONCE) * TILE_ROWS)
        offset = None if held.offset is None else held.offset[rows]
        part = replace(held, codes=held.codes[rows], scale=held.scale[rows], offset=offset)
        out[begin : begin + TILES_AT_ONCE] = _packed(part)
    return out


def _packed(held: Codes) -> Tensor:
    n_rows, columns = held.codes.shape
    tiles = -(-n_rows // TILE_ROWS)
    codes = _whole_tiles(held.codes, tiles).view(tiles, TILE_ROWS, columns // BLOCK_COLUMNS, BLOCK_COLUMNS)
    if held.bits == 4:
        low, high = codes.split(BLOCK_COLUMNS // 2, dim=3)
        codes = low | (high << 4)
    spans = columns // held.span
    parts = [codes.unflatten(3, (-1, 4)).permute(0, 2, 3, 1, 4).reshape(tiles, spans, -1)]
    scale = _whole_tiles(held.scale.half(), tiles).view(tiles, TILE_ROWS, spans, -1)
    parts.append(scale.permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(tiles, spans, -1))
    if held.offset is not None:
        offset = _whole_tiles(held.offset.bfloat16(), tiles).view(tiles, TILE_ROWS, spans, -1)
        parts.append(offset.transpose(1, 2).contiguous().view(torch.uint8).view(tiles, spans, -1))
    return torch.cat(parts, dim=2).view(tiles, -1)


def _whole_tiles(x: Tensor, tiles: int) -> Tensor:
    missing = tiles * TILE_ROWS - x.shape[0]
    return x.contiguous() if not missing else torch.cat((x, x.new_zeros(missing, x.shape[1])))


class Matrix:
    """See `kvarn.kernels.api.CodeMatrix`. arena: where its bytes lie; None: by themselves. isa: one of
    `instruction_sets()`, None for the best."""

    __slots__ = ("_keep", "_native", "rows", "width")

    def __init__(
        self,
        held: Codes,
        width: int,
        bias: Tensor | None = None,
        arena: Arena | None = None,
        isa: str | None = None,
    ) -> None:
        data, shift = pack(held, arena), None if bias is None else bias.float().contiguous()
        self.rows, self.width = held.codes.shape[0], width
        self._keep = (data,) if shift is None else (data, shift)
        self._native = _native.Matrix(
            isa or _native.instruction_sets()[0],
            data.data_ptr(),
            self.rows,
            held.codes.shape[1],
            width,
            held.group,
            held.bits,
            held.offset is not None,
            0 if shift is None else shift.data_ptr(),
        )

    @property
    def native(self) -> _native.Matrix:
        """Its description on the C++ side."""
        return self._native

    def product(self, x: Tensor, dtype: torch.dtype | None = None, residual: Tensor | None = None) -> Tensor:
        return self._run(x, _AS_IS, 0, 0.0, 0, dtype or x.dtype, residual)

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._run(x, _NORMED, weight.data_ptr(), eps, 0, x.dtype, None)

    def gated(self, x: Tensor, activation: str, residual: Tensor | None = None) -> Tensor:
        return self._run(x, _GATED, 0, 0.0, ACTIVATIONS[activation], x.dtype, residual)

    def _run(
        self,
        x: Tensor,
        before: int,
        norm: int,
        eps: float,
        activation: int,
        dtype: torch.dtype,
        residual: Tensor | None,
    ) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        n_rows = x.shape[0]
        out = torch.empty((n_rows, self.rows), dtype=dtype)
        self._native.product(
            x.data_ptr(),
            x.stride(0),
            DTYPES[x.dtype],
            n_rows,
            before,
            norm,
            eps,
            activation,
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            out.data_ptr(),
            DTYPES[dtype],
            torch.get_num_threads(),
        )
        return out

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty((ids.shape[0], self.width), dtype=dtype)
        self._native.gather(ids.data_ptr(), ids.shape[0], out.data_ptr(), DTYPES[dtype], torch.get_num_threads())
        return out

    def tensors(self) -> tuple[Tensor, ...]:
        return self._keep
