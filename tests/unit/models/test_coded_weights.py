"""Weights as codes: a file's blocks are read without loss, numbers are rounded within half a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvarn.models.loading.load import load_kind
from kvarn.models.weights._codes import codes_of, round_to_4_bits, round_to_8_bits, stack
from kvarn.models.weights._ggml import QUANTIZED, decode
from kvarn.models.weights.base import LinearSpec, RawBlocks

EXACT = ("Q4_0", "Q5_0", "Q8_0")
ROUNDED_OFFSETS = ("Q4_1", "Q5_1")
ROUNDED_SCALES = ("Q4_K", "Q5_K")
OFFSET_ULP = 2**-9  # bfloat16


class Numbers:
    """A source over tensors in memory; quantized ones by their blocks."""

    provenance, norms_include_one = "memory", False

    def __init__(self, tensors: Mapping[str, torch.Tensor | RawBlocks]) -> None:
        self.tensors = tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        return None

    def read(self, name: str, out: torch.Tensor) -> None:
        held = self.tensors[name]
        out.copy_(decode(held.type, held.data.numpy()) if isinstance(held, RawBlocks) else held)

    def raw(self, name: str) -> RawBlocks | None:
        held = self.tensors[name]
        return held if isinstance(held, RawBlocks) else None


def random_blocks(kind: str, rows: int, columns: int) -> RawBlocks:
    """Random bytes with sane scales."""
    numbers, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = np.random.default_rng(len(kind) + rows).integers(0, 256, (rows, columns // numbers, nbytes), dtype=np.uint8)
    halves = {"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}.get(
        kind, (0, 2) if "1" in kind or "K" in kind else (0,)
    )
    for at in halves:
        data[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return RawBlocks(kind, torch.from_numpy(data.reshape(rows, -1)))


@pytest.mark.parametrize("kind", EXACT)
def test_blocks_are_read_without_loss(kind: str) -> None:
    raw = random_blocks(kind, 7, 512)
    held = codes_of(raw)
    assert held is not None and held.bits == (4 if kind.startswith("Q4") else 8)
    assert torch.equal(held.floats(), decode(kind, raw.data.numpy()))


@pytest.mark.parametrize("kind", ROUNDED_OFFSETS)
def test_offsets_lose_no_more_than_their_rounding(kind: str) -> None:
    raw = random_blocks(kind, 7, 512)
    held, exact = codes_of(raw), decode(kind, raw.data.numpy())
    assert held is not None and held.offset is not None
    lost = (held.floats() - exact).unflatten(1, (-1, held.group))
    assert (lost.abs() <= held.offset.float().abs().unsqueeze(-1) * OFFSET_ULP + 1e-7).all()
    assert torch.allclose(lost, lost[..., :1].expand_as(lost), atol=1e-7), "codes and scales are the file's"


def test_offsets_of_real_blocks_are_small() -> None:
    """Numbers on both sides of 0: what an offset from the middle code loses is a hundredth of a step."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
    held = round_to_4_bits(weight)
    assert held.offset is not None
    assert (held.offset.float().abs() / held.scale.float()).mean() * OFFSET_ULP < 0.01


@pytest.mark.parametrize("kind", ROUNDED_SCALES)
def test_k_quants_lose_no_more_than_their_scales_rounding(kind: str) -> None:
    raw = random_blocks(kind, 7, 512)
    held, exact = codes_of(raw), decode(kind, raw.data.numpy())
    assert held is not None and held.offset is not None
    scale, offset = (s.float().abs().repeat_interleave(32, dim=1) for s in (held.scale, held.offset))
    largest = scale * 31 + offset + scale * held.zero  # of scale and least number, in half precision
    assert ((held.floats() - exact).abs() <= largest * 2**-11 + offset * OFFSET_ULP + 1e-6).all()


@pytest.mark.parametrize("kind", sorted(QUANTIZED))
def test_native_holds_every_type(kind: str) -> None:
    raw = random_blocks(kind, 48, 512)
    product = load_kind("native").linear(LinearSpec((("a", 48),), 512), Numbers({"a.weight": raw}))
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = F.linear(x.double(), decode(kind, raw.data.numpy()).double())
    assert ((product(x).double() - exact).norm() / exact.norm()) < 0.015


@pytest.mark.parametrize("columns", [32, 96, 100])
def test_numbers_are_rounded_within_half_a_step(columns: int) -> None:
    weight = torch.randn(9, columns, generator=torch.Generator().manual_seed(1))
    for held in (round_to_4_bits(weight), round_to_8_bits(weight), round_to_8_bits(weight, None)):
        numbers = held.floats()[:, :columns]
        step = held.scale.float().repeat_interleave(held.group, dim=1)[:, :columns]
        assert ((numbers - weight).abs() <= step * 0.5 + weight.abs() * 2e-3).all()


def test_a_constant_block_is_kept() -> None:
    assert torch.allclose(round_to_4_bits(torch.full((2, 32), 0.5)).floats(), torch.full((2, 32), 0.5), atol=1e-5)
    assert not round_to_8_bits(torch.zeros(2, 32)).floats().any()


def test_parts_of_different_types_are_stacked_without_loss() -> None:
    parts = [codes_of(random_blocks(kind, rows, 256)) for kind, rows in (("Q4_1", 3), ("Q5_0", 5), ("Q8_0", 2))]
    held = [p for p in parts if p is not None]
    assert torch.allclose(stack(held).floats(), torch.cat([p.floats() for p in held]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["int4", "int8", "native"])
def test_kinds_over_float_weights(name: str) -> None:
    """native keeps floats as bfloat16; the others round: the error of a product stays below the steps' own."""
    kind, seeded = load_kind(name), torch.Generator().manual_seed(2)
    weight, bias = torch.randn(100, 160, generator=seeded), torch.randn(100, generator=seeded)
    source = Numbers({"a.weight": weight[:40], "b.weight": weight[40:], "a.bias": bias[:40], "b.bias": bias[40:]})
    product = kind.linear(LinearSpec((("a", 40), ("b", 60)), 160, bias=True), source)
    x = torch.randn(5, 160, generator=seeded).bfloat16()
    exact = F.linear(x.double(), weight.double(), bias.double())
    bound = {"int4": 0.12, "int8": 0.02, "native": 0.01}[name]
    assert (product(x).double() - exact).norm() / exact.norm() < bound
    assert product(x).dtype == kind.activations == torch.bfloat16


@pytest.mark.parametrize("name", ["int4", "int8", "native"])
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    kind = load_kind(name)
    source = Numbers({"a.weight": random_blocks("Q4_1", 96, 512)})
    product = kind.linear(LinearSpec((("a", 96),), 512), source)
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    whole = product(x)
    assert all(torch.equal(product(x[:n].contiguous()), whole[:n]) for n in (1, 2, 3, 5, 11, 12, 13, 39))


@pytest.mark.parametrize("name", ["int4", "int8", "native"])
def test_a_table_gives_rows_and_float_logits(name: str) -> None:
    raw = random_blocks("Q8_0", 50, 64)
    numbers = decode("Q8_0", raw.data.numpy())
    table = load_kind(name).table("t", (50, 64), Numbers({"t": raw}), True)
    ids = torch.tensor([7, 0, 49, 7])
    assert torch.allclose(table.rows(ids).float(), numbers[ids], rtol=2**-7, atol=0.02 if name == "int8" else 1e-6)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits, exact = table.product()(x), F.linear(x.double(), numbers.double())
    assert logits.dtype == torch.float32
    assert (logits.double() - exact).norm() / exact.norm() < 0.02


def test_int4_keeps_four_bits_and_rounds_the_rest() -> None:
    spec, kind = LinearSpec((("a", 64),), 512), load_kind("int4")
    own, wide = (
        kind.linear(spec, Numbers({"a.weight": random_blocks(t, 64, 512)})).tensors()[0].nbytes
        for t in ("Q4_0", "Q8_0")
    )
    assert own == 64 * 512 * 4.5 / 8
    assert wide == 64 * 512 * 5 / 8
