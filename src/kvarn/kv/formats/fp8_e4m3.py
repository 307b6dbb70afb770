"""8-bit floats with 4 bits of exponent and 3 of mantissa; beyond +-448 they saturate; a NaN stays one."""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.core.formats import Format, TensorLayout


@dataclass(frozen=True)
class Float8(Format):
    """No scales: an element is its own."""

    lossless: bool = False
    rewritable: bool = True
    sealed_only: bool = True

    def k_layout(self, dim: int, block_size: int) -> tuple[TensorLayout, ...]:
        return (TensorLayout("k", (dim, block_size), "float8_e4m3fn", token_axis=1),)

    def v_layout(self, dim: int, block_size: int) -> tuple[TensorLayout, ...]:
        return (TensorLayout("v", (block_size, dim), "float8_e4m3fn", token_axis=0),)


FORMAT = Float8("fp8_e4m3")
