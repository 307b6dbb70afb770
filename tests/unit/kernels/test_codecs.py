"""The parts that the codecs of the reference are made of."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.formats import FloatFormat
from kvarn.kernels.reference.codecs import GAUSS_CENTROIDS, encode, hadamard, pack, rotate, unpack, unrotate


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("n", [8, 16, 24, 32, 64, 80])
def test_packing_loses_nothing_and_fills_every_bit(bits: int, n: int) -> None:
    codes = torch.randint(0, 2**bits, (3, n), generator=torch.Generator().manual_seed(n))
    packed = pack(codes, bits)
    assert packed.shape == (3, n * bits // 8)
    assert torch.equal(unpack(packed, bits), codes.int())


def test_the_order_of_packed_codes() -> None:
    """As the kernels read them: neighbours in neighbouring bytes, the next stretch in the next bits."""
    four = pack(torch.arange(32) % 16, 4)
    assert four.tolist() == [i | (i << 4) for i in range(16)]
    three = pack(torch.full((32,), 5), 3)
    assert three.tolist() == [0b01010101] * 8 + [0b11111111] * 4


@pytest.mark.parametrize("n", [32, 40, 64, 96, 256])
def test_rotation_keeps_dot_products_and_can_be_undone(n: int) -> None:
    g = torch.Generator().manual_seed(n)
    x, y = (torch.randn(5, n, dtype=torch.float64, generator=g) for _ in range(2))
    torch.testing.assert_close((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1))
    torch.testing.assert_close(unrotate(rotate(x)), x)
    torch.testing.assert_close(hadamard(hadamard(x)), x)


def test_hadamard_of_four() -> None:
    matrix = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    torch.testing.assert_close(hadamard(torch.eye(4)), matrix)


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0.0


def below(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("bits", GAUSS_CENTROIDS)
def test_centroids_are_the_means_of_their_cells(bits: int) -> None:
    """The Lloyd-Max condition: each is the mean of N(0, 1) between the midpoints to its neighbours."""
    half = GAUSS_CENTROIDS[bits]
    edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(half)), math.inf]
    for centroid, a, b in zip(half, edges, edges[1:], strict=False):
        assert centroid == pytest.approx((density(a) - density(b)) / (below(b) - below(a)), abs=2e-3)


def test_a_format_without_codec_is_refused() -> None:
    with pytest.raises(IncompatiblePlan, match="float8"):
        encode(FloatFormat("float8"), torch.zeros(1, 8, 8), torch.ones(1, 8, dtype=torch.bool), tokens_in_row=True)
