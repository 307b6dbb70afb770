"""Each matrix as its file holds it, multiplied the fastest way known: quantized blocks stay codes (4 bits stay 4, more
become 8), floats become bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvarn.models.weights._coded import CodedKind
from kvarn.models.weights._float import FloatKind
from kvarn.models.weights.base import LinearSpec, Product, Table, TensorSource
from kvarn.models.weights.int4 import own_blocks


@dataclass(frozen=True)
class NativeKind:
    """Chooses for each matrix; where some parts of one are floats, all are multiplied as floats."""

    name: str
    coded: CodedKind
    floats: FloatKind
    activations: torch.dtype = torch.bfloat16

    def linear(self, spec: LinearSpec, source: TensorSource) -> Product:
        quantized = all(source.raw(f"{name}.weight") is not None for name, _ in spec.parts)
        return (self.coded if quantized else self.floats).linear(spec, source)

    def table(self, name: str, shape: tuple[int, int], source: TensorSource, tied: bool) -> Table:
        return (self.floats if source.raw(name) is None else self.coded).table(name, shape, source, tied)


KIND = NativeKind("native", CodedKind("native", own_blocks, own_blocks), FloatKind("native", torch.bfloat16))
