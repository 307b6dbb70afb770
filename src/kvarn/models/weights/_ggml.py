"""Numbers of ggml's tensor types, decoded by the `gguf` package."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
QUANTIZED = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})


CHUNK_ELEMENTS = 1 << 16  # decoded at a time: 256 KiB of float32, so that the steps between stay in the cache


def decode(kind: str, data: np.ndarray) -> Tensor:
    """data [rows, bytes a row] uint8 -> [rows, columns]: float32, or the file's own float type."""
    if kind in FLOATS:
        numbers = torch.from_numpy(np.ascontiguousarray(data).view(FLOATS[kind]))
        return numbers.view(torch.bfloat16) if kind == "BF16" else numbers
    # as one long row: blocks do not know rows, and the package works through rows a few at a time
    return torch.from_numpy(dequantize(data.reshape(1, -1), GGMLQuantizationType[kind])).view(len(data), -1)


def decode_into(out: Tensor, kind: str, data: np.ndarray) -> None:
    """Fill out [rows, columns] (any float dtype) from data [rows, bytes a row], a few rows at a time."""
    rows_at_once = max(1, CHUNK_ELEMENTS // max(1, out.shape[-1]))
    for begin in range(0, len(data), rows_at_once):
        rows = slice(begin, begin + rows_at_once)
        out[rows].copy_(decode(kind, data[rows]).view(out[rows].shape))
