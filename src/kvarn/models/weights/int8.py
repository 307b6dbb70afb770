"""8 bits a weight and one scale a row, activations in int8 with one scale a token: the fastest for many rows.

Fast and invariant are one path.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvarn.kernels.api import Codes
from kvarn.models.weights._coded import CodedKind
from kvarn.models.weights._codes import round_to_8_bits
from kvarn.models.weights.base import RawBlocks


def whole_rows(raw: RawBlocks | None, numbers: Callable[[], Tensor]) -> Codes:
    """One scale for all columns of a row."""
    return round_to_8_bits(numbers(), group=None)


KIND = FAST = CodedKind("int8", whole_rows, whole_rows, bits=8, group=None)
