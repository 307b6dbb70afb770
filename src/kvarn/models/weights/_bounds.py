"""The most by which a product may differ from the exact one, from how its numbers and its activations are rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from kvarn.kernels.api import span_columns
from kvarn.models.weights._codes import parts_of

SUM_ULP = 2.0**-23  # of a sum in float32: a unit a term is more than any order of adding loses
SCALE_ULP = 3 * 2.0**-11  # scale and offset in half precision, over a group's largest magnitude
SCALE_LEAST = 2.0**-18  # the same where half precision has no digits left
OFFSET_ULP = 2.0**-9  # of an offset, and of the sum of activations that it is multiplied with, in bfloat16


def of_floats(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights rounded to `dtype`, sums in float32, the result rounded to `dtype`. x [T, K] (numbers of `dtype`) and
    weight [N, K] in float64. Returns [T, N]."""
    half_ulp = torch.finfo(dtype).eps / 2
    within = (half_ulp + x.shape[1] * SUM_ULP) * (x.abs() @ weight.abs().T)
    return within + half_ulp * ((x @ weight.T).abs() + within)


def of_codes(x: Tensor, weight: Tensor, bits: int, group: int | None) -> Tensor:
    """Weights of each `group` columns (None: of a row) rounded to codes of `bits`, activations of a span of them to
    int8, exact sums within a group, the result rounded to bfloat16. x [T, K] and weight [N, K] in float64. Returns
    [T, N]. Weights that a file holds as such codes lose less."""
    columns = parts_of(weight, group).flatten(1).shape[1]
    off_weight, off_x = _weight_error(weight, bits, group), _half_step(x, 254, span_columns(columns, group or columns))
    within = off_x @ weight.abs().T + (x.abs() + off_x) @ off_weight.T
    if bits == 4:  # an offset is as large as the group's largest magnitude and half a step at most
        within = within + OFFSET_ULP * (x.abs() + off_x) @ (_half_step(weight, 1, group) * 16 / 15).T
    within = within + x.shape[1] * SUM_ULP * (x.abs() @ weight.abs().T)
    return within + torch.finfo(torch.bfloat16).eps / 2 * ((x @ weight.T).abs() + within)


def _weight_error(weight: Tensor, bits: int, group: int | None) -> Tensor:
    """[N, K] -> [N, K]. 8 bits: 254 steps from the largest magnitude's negative to itself; 4: 15 from least to most,
    which lie at most twice that magnitude apart."""
    steps = 254 if bits == 8 else 15
    rounded = 2 * SCALE_ULP + (OFFSET_ULP * 16 / 15 if bits == 4 else 0)
    return _half_step(weight, steps, group) + rounded * _half_step(weight, 1, group) + SCALE_LEAST


def _half_step(numbers: Tensor, steps: int, group: int | None) -> Tensor:
    """[N, K] -> [N, K]: half of one of `steps` even steps over twice the group's largest magnitude."""
    parts = parts_of(numbers, group)
    half = parts.abs().amax(-1, keepdim=True) / steps
    return half.expand(parts.shape).flatten(1)[:, : numbers.shape[1]]
