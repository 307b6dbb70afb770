"""What is not finite, or too large for a format, is not made to look ordinary."""

from __future__ import annotations

import pytest
import torch

from kvarn.core.formats import format_names, parse_kv_format
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


SEALED = [name for name in format_names() if not parse_kv_format(name).k.lossless]


@each_backend
@pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fmt", SEALED)
def test_one_number_that_is_not_finite_is_sealed_as_the_specification_says(
    backend: Backend, fmt: str, value: float, side: int
) -> None:
    """Alone among others at the beginning, in the middle and at the end; and where all that share a scale are so."""
    bag = make_bag(HEADS, (96,), (1,))
    stored = (bag.source.k, bag.source.v)[side][0]
    tokens = stored if side else stored.transpose(-1, -2)
    for block, at in zip(bag.blocks, (0, 17, 31), strict=True):
        tokens[block, 1, 0, at, 2 * at] = value
    tokens[bag.blocks[0], 0, 0] = value
    expected = REFERENCE.decode(sealed(bag, fmt), bag.blocks)
    got = backend.decode(sealed(bag, fmt, backend), bag.blocks)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    turned = got[side] if side else got[side].transpose(-1, -2)
    hidden = turned[1, 1, 0, 17, 34]
    if value != value or fmt.startswith("turbo"):
        assert hidden.isnan()
    else:
        assert hidden * value > 0 and hidden.abs() >= 448, "it keeps its sign"


@each_backend
@pytest.mark.parametrize("length", [40, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", SEALED)
def test_a_nan_that_was_sealed_reaches_who_attends_to_it(
    backend: Backend, fmt: str, dtype: torch.dtype, length: int
) -> None:
    for side in (0, 1):
        bag = make_bag(HEADS, (length,), (2,))
        stored = (bag.source.k, bag.source.v)[side][0]
        tokens = stored if side else stored.transpose(-1, -2)
        tokens[bag.table.block[0, 0].long(), 0, 1, 20, 3] = torch.nan
        q, params = queries(bag, dtype), plain_params(bag)
        out = backend.attend(q, bag.rows, bag.table, (sealed(bag, fmt, backend),), 0, params).out
        exact = REFERENCE.attend(q, bag.rows, bag.table, (sealed(bag, fmt),), 0, params).out
        assert exact[:, 3:].isnan().any(-1).all() and not exact[:, :3].isnan().any()
        assert (out.isnan() == exact.isnan()).all()
