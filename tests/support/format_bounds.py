"""How far a decoded number may lie from the one that was written, format by format."""

from __future__ import annotations

import torch
from torch import Tensor

# Gaussian numbers: relative mean square error of the Lloyd-Max quantizers (Max 1960), which a rotation makes of any.
LLOYD_MAX = {"turbo4": 0.009497, "turbo3": 0.03454, "turbo2": 0.1175}


def bound(name: str, x: Tensor, *, key: bool) -> Tensor:
    """The stated bound on |x - decoded|, elementwise; x [..., tokens, channels], tokens of one block and head."""
    top = x.abs().amax(-1, keepdim=True)
    half = 2.0**-11  # half a unit in the last place of float16, relative
    if name in ("float32", "bfloat16", "float16"):
        return x.abs() * {"float32": 0.0, "bfloat16": 2.0**-8, "float16": half}[name] + 2.0**-25
    if name == "fp8_e4m3":
        return torch.maximum(x.abs() * 2.0**-4, torch.tensor(2.0**-10)) + (x.abs() - 448).clamp_min(0)
    if name == "int8":
        return top / 127 * (0.5 + 127 * half) + 1e-6
    bits = int(name[-1])
    if name.startswith("int"):
        part = x if key else x.unflatten(-1, (-1, 32))
        axis = -2 if key else -1
        low, high = part.amin(axis, keepdim=True), part.amax(axis, keepdim=True)
        step = (high - low) / (2**bits - 1)
        limit = step * 0.5 * (1 + half) + (high - low) * half * 2 + low.abs() * half + 1e-6
        return (limit.expand_as(part) if key else limit.expand_as(part).flatten(-2)).clone()
    # rotated: each number may be off by as much as all together; the sum of squares is what is bounded
    return x.norm(dim=-1, keepdim=True).expand_as(x)
