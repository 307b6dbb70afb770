"""Products with matrices of codes: the native ones on every instruction set against the specification in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from kvarn.kernels.api import Codes
from kvarn.kernels.reference.matrix import Matrix as Reference
from kvarn.kernels.reference.matrix import rounded

cpu_matrix = pytest.importorskip("kvarn.kernels.cpu.matrix", reason="the native kernels are not built")
_native = pytest.importorskip("kvarn.kernels.cpu._native")
ISAS = _native.instruction_sets()
FORMS = {  # bits, whether there are offsets, columns of a group
    "q4_1": (4, True, 32),
    "q4_0": (4, False, 32),
    "q5_1": (8, True, 32),
    "q8_0": (8, False, 32),
    "int8 rows": (8, False, None),
}


@cache
def codes(form: str, rows: int, columns: int) -> Codes:
    bits, offsets, group = FORMS[form]
    seeded = torch.Generator().manual_seed(rows + columns)
    marks = rows, columns // (group or columns)
    numbers = torch.randint(0, 2**bits, (rows, columns), generator=seeded, dtype=torch.uint8)
    scale = (torch.rand(marks, generator=seeded) * 0.01 + 0.001).half()
    offset = (torch.randn(marks, generator=seeded) * 0.05).bfloat16() if offsets else None
    return Codes(numbers, scale, offset, bits)


WHOLE_SUMS = {"avx2"}  # what multiplies offsets is not rounded to bfloat16 there


def exact_product(held: Codes, x: torch.Tensor, isa: str) -> torch.Tensor:
    """x [T, K] rounded as the specification says, times the numbers, in float64 -> [T, N]."""
    codes, scale = (part.double() for part in rounded(x, held.span))
    out = (codes * scale).flatten(1) @ replace(held, offset=None).floats().double().T
    if held.offset is None:
        return out
    whole = codes.unflatten(2, (-1, held.group)).sum(-1)
    sums = (whole if isa in WHOLE_SUMS else whole.bfloat16().double()) * scale
    return out + sums.flatten(1) @ held.offset.double().T


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 32, 32), (100, 576, 576), (33, 160, 150), (16, 1536, 1536)])
def test_product_against_float64(isa: str, form: str, rows: int, columns: int, width: int) -> None:
    held = codes(form, rows, columns)
    bias = torch.linspace(-1, 1, rows)
    matrix = cpu_matrix.Matrix(held, width, bias, isa=isa)
    x = torch.randn(29, width, generator=torch.Generator().manual_seed(3)) * 3
    exact = exact_product(held, F.pad(x, (0, columns - width)), isa) + bias.double()
    scale = F.pad(x, (0, columns - width)).double().abs() @ held.floats().double().abs().T + 1
    assert ((matrix.product(x).double() - exact).abs() / scale).max() < 2e-6
    residual = torch.randn(29, rows, generator=torch.Generator().manual_seed(4)).bfloat16()
    added = matrix.product(x, torch.bfloat16, residual)
    assert torch.allclose(added.double(), exact + residual.double(), rtol=2**-8, atol=1e-2 * float(scale.max()) * 1e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
def test_activations_of_any_size(isa: str, form: str) -> None:
    """Spans of zeros, first, between and last, and spans smaller than others by 2^100."""
    held = codes(form, 48, 576)
    matrix = cpu_matrix.Matrix(held, 576, isa=isa)
    x = torch.randn(6, 576, generator=torch.Generator().manual_seed(8))
    x[0, :64] = 0
    x[1, 128:256] = 0
    x[2, 512:] = 0
    x[3] = 0
    x[4, 64:128] *= 2.0**-100
    x[5] *= 2.0**-100
    x[5, 320:384] *= 2.0**100
    got, exact = matrix.product(x, torch.float32).double(), exact_product(held, x, isa)
    scale = x.double().abs() @ held.floats().double().abs().T
    assert ((got - exact).abs() <= 2e-6 * scale).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 4, 13])
def test_a_nan_goes_through(isa: str, form: str, rows: int) -> None:
    matrix = cpu_matrix.Matrix(codes(form, 48, 576), 576, isa=isa)
    for column in (0, 17, 63, 64, 300, 575):
        x = torch.ones(rows, 576)
        x[-1, column] = torch.nan
        out = matrix.product(x, torch.float32)
        assert out[-1].isnan().all() and out[:-1].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(isa: str, form: str, threads: int) -> None:
    matrix, before = cpu_matrix.Matrix(codes(form, 100, 576), 576, isa=isa), torch.get_num_threads()
    x = torch.randn(61, 576, generator=torch.Generator().manual_seed(5)).bfloat16()
    torch.set_num_threads(threads)
    try:
        whole = matrix.product(x, torch.float32)
        for batch in (*range(1, 15), 24, 25, *range(31, 38), 60):
            assert torch.equal(matrix.product(x[:batch], torch.float32), whole[:batch]), f"batch of {batch}"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_in_front_are_those_of_the_reference(isa: str, form: str, dtype: torch.dtype) -> None:
    """A value at the border between two int8 steps may fall on either side, which moves a sum by one such step."""
    held = codes(form, 48, 576)
    native, plain = cpu_matrix.Matrix(held, 576, isa=isa), Reference(held, 576)
    seeded = torch.Generator().manual_seed(6)
    x, weight = torch.randn(5, 576, generator=seeded).to(dtype), torch.rand(576, generator=seeded)
    both, residual = torch.randn(5, 1152, generator=seeded).to(dtype), torch.randn(5, 48, generator=seeded).to(dtype)
    for got, wanted in (
        (native.normed(x, weight, 1e-5), plain.normed(x, weight, 1e-5)),
        (native.gated(both, "silu", residual), plain.gated(both, "silu", residual)),
        (native.gated(both, "gelu_tanh"), plain.gated(both, "gelu_tanh")),
    ):
        assert got.dtype == dtype
        spread = float(wanted.float().std())
        assert (got.float() - wanted.float()).abs().max() < 0.03 * spread


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
def test_gathered_rows_are_the_numbers(isa: str, form: str) -> None:
    held = codes(form, 100, 160)
    matrix = cpu_matrix.Matrix(held, 150, isa=isa)
    ids = torch.tensor([0, 15, 16, 99, 99, 42] * 5)
    assert torch.allclose(matrix.gather(ids, torch.float32), held.floats()[ids, :150], atol=1e-6)


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="not a matrix of codes"):
        _native.Matrix(ISAS[0], 0, 16, 33, 33, 33, 4, False, 0)
