"""The most by which a product may differ from the exact one, from how its numbers and its activations are rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from kvarn.models.weights._codes import parts_of

SUM_ULP = 2.0**-23  # of a sum in float32: a unit a term is more than any order of adding loses
SCALE_ULP = 3 * 2.0**-11  # scale and offset in half precision, over a group's largest magnitude
SCALE_LEAST = 2.0**-18  # the same where half precision has no digits left


def of_floats(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights rounded to `dtype`, sums in float32, the result rounded to `dtype`. x [T, K] (numbers of `dtype`) and
    weight [N, K] in float64. Returns [T, N]."""
    half_ulp = torch.finfo(dtype).eps / 2
    within = (half_ulp + x.shape[1] * SUM_ULP) * (x.abs() @ weight.abs().T)
    return within + half_ulp * ((x @ weight.T).abs() + within)


def of_codes(x: Tensor, weight: Tensor, bits: int, group: int | None) -> Tensor:
    """Weights of each `group` columns (None: of a row) rounded to codes of `bits`, activations of the same columns to
    int8, exact sums within a group, the result rounded to bfloat16. x [T, K] and weight [N, K] in float64. Returns
    [T, N]. Weights that a file holds as such codes lose less."""
    off_weight, off_x = _weight_error(weight, bits, group), _half_step(x, 254, group)
    within = off_x @ weight.abs().T + (x.abs() + off_x) @ off_weight.T
    within = within + x.shape[1] * SUM_ULP * (x.abs() @ weight.abs().T)
    return within + torch.finfo(torch.bfloat16).eps / 2 * ((x @ weight.T).abs() + within)


def _weight_error(weight: Tensor, bits: int, group: int | None) -> Tensor:
    """[N, K] -> [N, K]. 8 bits: 254 steps from the largest magnitude's negative to itself; 4: 15 from least to most,
    which lie at most twice that magnitude apart."""
    steps = 254 if bits == 8 else 15
    return _half_step(weight, steps, group) + 2 * SCALE_ULP * _half_step(weight, 1, group) + SCALE_LEAST


def _half_step(numbers: Tensor, steps: int, group: int | None) -> Tensor:
    """[N, K] -> [N, K]: half of one of `steps` even steps over twice the group's largest magnitude."""
    parts = parts_of(numbers, group)
    half = parts.abs().amax(-1, keepdim=True) / steps
    return half.expand(parts.shape).flatten(1)[:, : numbers.shape[1]]
