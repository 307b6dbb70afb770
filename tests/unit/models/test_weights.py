"""Weight kinds: what a product computes, and that a row's bits do not hang on the rows beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvarn.core.registry import names_in
from kvarn.models.loading.load import load_kind
from kvarn.models.weights._ggml import FLOATS, QUANTIZED, decode, decode_into
from kvarn.models.weights.base import LinearSpec, RawBlocks

KINDS = names_in("kvarn.models.weights")
SHAPES = [(96, 64), (960, 576), (576, 1536), (640, 2048), (260, 32)]


class Numbers:
    """A source over tensors in memory."""

    provenance, norms_include_one = "memory", False

    def __init__(self, tensors: Mapping[str, torch.Tensor], blocks: Mapping[str, RawBlocks] | None = None) -> None:
        self.tensors, self.blocks = tensors, blocks or {}

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].shape) if name in self.tensors else None

    def read(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self.tensors[name])

    def raw(self, name: str) -> RawBlocks | None:
        return self.blocks.get(name)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_product_of_parts_is_the_product_of_each(name: str, rows: int, columns: int, bias: bool) -> None:
    kind, seeded = load_kind(name), torch.Generator().manual_seed(0)
    cut = rows // 3
    tensors = {
        "a.weight": torch.randn(cut, columns, generator=seeded),
        "b.weight": torch.randn(rows - cut, columns, generator=seeded),
        "a.bias": torch.randn(cut, generator=seeded),
        "b.bias": torch.randn(rows - cut, generator=seeded),
    }
    product = kind.linear(LinearSpec((("a", cut), ("b", rows - cut)), columns, bias), Numbers(tensors))
    x = torch.randn(5, columns, generator=seeded).to(kind.activations)
    weight = torch.cat((tensors["a.weight"], tensors["b.weight"])).to(kind.activations).double()
    shift = torch.cat((tensors["a.bias"], tensors["b.bias"])).to(kind.activations).double() if bias else None
    exact = F.linear(x.double(), weight, shift)
    error = (product(x).double() - exact).abs().max() / exact.abs().max()
    assert error < (1e-5 if name == "float32" else 1e-2)
    assert product(x).dtype == kind.activations


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(name: str, rows: int, columns: int, threads: int) -> None:
    """Rule 4 of the design begins here: the same request gives the same tokens whatever else is in the batch."""
    kind, before = load_kind(name), torch.get_num_threads()
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    product = kind.linear(LinearSpec((("a", rows),), columns), Numbers({"a.weight": weight}))
    x = torch.randn(200, columns, generator=torch.Generator().manual_seed(2)).to(kind.activations)
    torch.set_num_threads(threads)
    try:
        whole = product(x)
        for batch in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64, 129):
            assert torch.equal(product(x[:batch].contiguous()), whole[:batch]), f"batch of {batch}"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_table_of_blocks_equals_table_of_numbers(name: str, tied: bool) -> None:
    """Q8_0 rows decoded one by one are the rows of the decoded table, and so is the tied product."""
    kind = load_kind(name)
    blocks = np.random.default_rng(0).integers(0, 256, (50, 2, 34), dtype=np.uint8)
    blocks[:, :, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    raw = RawBlocks("Q8_0", torch.from_numpy(blocks.reshape(50, -1)))
    numbers = decode("Q8_0", raw.data.numpy())
    plain = kind.table("t", (50, 64), Numbers({"t": numbers}), tied)
    packed = kind.table("t", (50, 64), Numbers({"t": numbers}, {"t": raw}), tied)
    ids = torch.tensor([7, 0, 49, 7])
    assert torch.equal(plain.rows(ids), packed.rows(ids))
    assert packed.rows(ids).dtype == kind.activations
    if tied:
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(kind.activations)
        assert torch.equal(plain.product()(x), packed.product()(x))


@pytest.mark.parametrize("rows", [1, 3, 700])
def test_decoding_in_pieces_equals_decoding_whole(rows: int) -> None:
    data = np.random.default_rng(0).integers(0, 255, (rows, 18 * 8), dtype=np.uint8)
    data.reshape(rows, 8, 18)[:, :, 1] = 0x20  # scales: small, and no NaN
    out = torch.empty(rows, 256)
    decode_into(out, "Q4_0", data)
    assert torch.equal(out, decode("Q4_0", data))


def test_every_kind_has_its_name() -> None:
    assert all(load_kind(name).name == name for name in KINDS)
    assert {"float32", "bfloat16"} <= set(KINDS)


def test_the_supported_types_are_those_promised() -> None:
    promised = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
    assert set(FLOATS) | QUANTIZED == set(promised)


def test_no_model_file_needs_transformers() -> None:
    for path in (Path(__file__).parents[3] / "src" / "kvarn" / "models").rglob("*.py"):
        assert "import transformers" not in path.read_text("utf-8")
        assert "from transformers" not in path.read_text("utf-8")
