"""4 bits a weight and a scale for each 32: the file's own blocks where it holds such, else rounded.

Embeddings and the output's matrix keep 8 bits, which is what files of 4 bits do too. FAST: prompts go through a second
form, 8 bits with fewer scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from kvarn.kernels.api import Codes
from kvarn.models.weights._coded import CodedKind
from kvarn.models.weights._codes import BLOCK_COLUMNS, codes_of, round_to_4_bits, round_to_8_bits, wide_groups
from kvarn.models.weights.base import RawBlocks


def four_bits(raw: RawBlocks | None, numbers: Callable[[], Tensor]) -> Codes:
    """The file's codes if they have 4 bits, else the numbers rounded."""
    held = codes_of(raw) if raw is not None else None
    return held if held is not None and held.bits == 4 else round_to_4_bits(numbers())


def own_blocks(raw: RawBlocks | None, numbers: Callable[[], Tensor]) -> Codes:
    """The file's codes whatever they are, else the numbers rounded to 8 bits."""
    held = codes_of(raw) if raw is not None else None
    return held if held is not None else round_to_8_bits(numbers())


KIND = CodedKind("int4", four_bits, own_blocks, bits=4, group=BLOCK_COLUMNS)
FAST = replace(KIND, for_many=wide_groups)
