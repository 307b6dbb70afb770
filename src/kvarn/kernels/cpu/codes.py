"""The numbers by which formats and element types are known to the C++ side (csrc/types.h)."""

from __future__ import annotations

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODECS = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "fp8_e4m3": 3,
    "int8": 4,
    "int4": 5,
    "int3": 6,
    "int2": 7,
    "turbo4": 8,
    "turbo3": 9,
    "turbo2": 10,
}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
