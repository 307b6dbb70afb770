"""What is not finite, or too large for a format, is not made to look ordinary."""

from __future__ import annotations

import pytest
import torch

from kvarn.kernels.api import Backend
from support.kernels import REFERENCE, Heads, backend_ids, backends, make_bag, plain_params, queries, sealed

BACKENDS = backends()
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=backend_ids)
HEADS = Heads(2, 3, 64, 64, 32)


@each_backend
@pytest.mark.parametrize("window_tokens", [None, 40])
@pytest.mark.parametrize("length", [33, 600])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "int4", "turbo4"])
def test_a_query_that_holds_a_nan_gives_nans_and_others_do_not(
    backend: Backend, stored: str, length: int, window_tokens: int | None
) -> None:
    bag = make_bag(HEADS, (length,), (3,))
    pool = bag.source if stored == "float32" else sealed(bag, stored)
    q, params = queries(bag, torch.bfloat16), plain_params(bag, window_tokens=window_tokens)
    q[1, 2, 5] = torch.nan
    got = backend.attend(q, bag.rows, bag.table, (pool,), 0, params)
    wrong = torch.zeros(q.shape[:2], dtype=torch.bool)
    wrong[1, 2] = True
    assert torch.equal(got.out.isnan().all(-1), wrong)
    assert torch.equal(got.out.isnan().any(-1), wrong)
    assert torch.equal(got.lse.isnan(), wrong)


@each_backend
@pytest.mark.parametrize("fmt", ["int8", "int4", "int2"])
@pytest.mark.parametrize("value", [1e25, -1e25])
def test_numbers_beyond_a_format_keep_their_sign(backend: Backend, fmt: str, value: float) -> None:
    """A scale in half precision is at most 65504; x / scale then lies beyond every integer."""
    bag = make_bag(HEADS, (32,), (1,))
    bag.source.k[0][bag.blocks], bag.source.v[0][bag.blocks] = value, value
    exact = REFERENCE.decode(sealed(bag, fmt), bag.blocks)
    got = REFERENCE.decode(sealed(bag, fmt, backend), bag.blocks)
    for side, expected in zip(got, exact, strict=True):
        torch.testing.assert_close(side, expected)
