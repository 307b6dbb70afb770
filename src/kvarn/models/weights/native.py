"""Each matrix as its file holds it, multiplied the fastest way known: quantized blocks stay codes (4 bits stay 4, more
become 8), floats become bfloat16. FAST: prompts go through a second form of the codes, 8 bits with fewer scales."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvarn.models.weights._coded import CodedKind
from kvarn.models.weights._codes import BLOCK_COLUMNS, wide_groups
from kvarn.models.weights._float import FloatKind
from kvarn.models.weights.base import LinearSpec, Product, Table, TensorSource, WeightRoom
from kvarn.models.weights.int4 import own_blocks


@dataclass(frozen=True)
class NativeKind:
    """Chooses for each matrix; where some parts of one are floats, all are multiplied as floats."""

    name: str
    coded: CodedKind
    floats: FloatKind
    activations: torch.dtype = torch.bfloat16

    def linear(self, spec: LinearSpec, source: TensorSource, room: WeightRoom | None = None) -> Product:
        quantized = all(source.raw(f"{name}.weight") is not None for name, _ in spec.parts)
        return (self.coded if quantized else self.floats).linear(spec, source, room)

    def table(
        self, name: str, shape: tuple[int, int], source: TensorSource, tied: bool, room: WeightRoom | None = None
    ) -> Table:
        return (self.floats if source.raw(name) is None else self.coded).table(name, shape, source, tied, room)

    def bound(self, x: Tensor, weight: Tensor) -> Tensor:
        """Of a quantized file's products, whose bound is the wider one."""
        return self.coded.bound(x, weight)


_CODED = CodedKind("native", own_blocks, own_blocks, bits=8, group=BLOCK_COLUMNS)
_FLOATS = FloatKind("native", torch.bfloat16)
KIND = NativeKind("native", _CODED, _FLOATS)
FAST = NativeKind("native", replace(_CODED, for_many=wide_groups), replace(_FLOATS, invariant=False))
