"""Every kind of weights, invariant and fast: the same bits in any batch where that is promised, errors within the
stated bound."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvarn.core.errors import UnknownName
from kvarn.core.options import NUMERICS, Numerics
from kvarn.core.registry import names_in
from kvarn.kernels import code_matrix
from kvarn.models.loading.load import load_kind
from kvarn.models.weights import _float
from kvarn.models.weights._check import COLUMNS, ROWS, Blocks, check_weights
from kvarn.models.weights._coded import CodeProduct
from kvarn.models.weights._codes import round_to_8_bits, wide_bytes, wide_group
from kvarn.models.weights.base import MANY_ROWS, LinearSpec, Product, RawBlocks, WeightRoom

KINDS = names_in("kvarn.models.weights")
BATCHES = (1, 2, 3, 7, 16, 17, 63, 64, 100)


class Numbers:
    """One matrix of floats."""

    provenance, norms_include_one = "memory", False

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.weight.shape)

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self.weight)

    def raw(self, name: str) -> RawBlocks | None:
        return None


def product_of(name: str, numerics: Numerics, weight: Tensor) -> Product:
    spec = LinearSpec((("a", weight.shape[0]),), weight.shape[1])
    return load_kind(name, numerics).linear(spec, Numbers(weight))


def heavy_tailed(rows: int, columns: int, seed: int) -> Tensor:
    """Like real activations: a few columns are tens of times larger than the rest."""
    seeded = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=seeded)
    x[:, torch.randint(columns, (max(1, columns // 50),), generator=seeded)] *= 40
    return x


@pytest.mark.parametrize("columns", [64, 100, 576, 1536])
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("name", KINDS)
def test_every_error_is_within_the_stated_bound(name: str, numerics: Numerics, columns: int) -> None:
    kind, weight = load_kind(name, numerics), heavy_tailed(ROWS, columns, 0) * 0.05
    product = product_of(name, numerics, weight)
    x = heavy_tailed(100, columns, 1).to(kind.activations)
    for rows in (1, 33, 100):
        mine = x[:rows]
        off = (product(mine).double() - mine.double() @ weight.double().T).abs()
        assert (off <= kind.bound(mine.double(), weight.double())).all()


@pytest.mark.parametrize("name", KINDS)
def test_the_bound_is_not_far_from_what_happens(name: str) -> None:
    """Rounding's errors partly cancel in sums of hundreds, so a bound of hundreds of times the error says nothing."""
    for found in check_weights():
        if found.weights == name:
            assert 0.005 < found.of_bound <= 1 or name == "float32", found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("packs", [True, False], ids=["laid out or widened", "tiles"])
@pytest.mark.parametrize("columns", [64, 576, 1536])
@pytest.mark.parametrize("name", KINDS)
def test_invariant_products_have_the_same_bits_in_any_batch_and_place(
    name: str, columns: int, packs: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        monkeypatch.setattr(_float, "packable", lambda dtype: False)
    elif name in ("float32", "bfloat16") and not _float.packable(torch.float32):
        pytest.skip("this build of PyTorch lays nothing out")
    product = product_of(name, "invariant", heavy_tailed(ROWS, columns, 2))
    x = heavy_tailed(100, columns, 3).to(load_kind(name).activations)
    before = torch.get_num_threads()
    whole = product(x)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(product(x), whole), "threads"
        for count in BATCHES:
            assert torch.equal(product(x[:count]), whole[:count]), f"the first {count}"
            assert torch.equal(product(x[-count:]), whole[-count:]), f"the last {count}"
        assert torch.equal(product(x.flip(0)), whole.flip(0)), "other places"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["native", "int4"])
def test_fast_prompts_go_through_a_second_form_at_a_byte_a_weight(name: str) -> None:
    raw = Blocks()
    spec = LinearSpec((("a", ROWS),), COLUMNS)
    invariant, fast = (load_kind(name, numerics).linear(spec, raw) for numerics in ("invariant", "fast"))
    second = CodeProduct(code_matrix(round_to_8_bits(raw.numbers, 96), spec.columns))
    x = torch.randn(MANY_ROWS, spec.columns, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert torch.equal(fast(x[:-1]), invariant(x[:-1]))
    assert torch.equal(fast(x), second(x)) and not torch.equal(fast(x), invariant(x))
    held = [sum(t.nbytes for t in product.tensors()) for product in (invariant, fast, second)]
    assert held[1] == held[0] + held[2] and held[2] == spec.rows * (spec.columns + 2 * spec.columns // 96)


@pytest.mark.parametrize(("columns", "group"), [(576, 96), (1536, 128), (640, 128), (2048, 128), (32, 32), (200, 32)])
def test_wide_groups_divide_a_row(columns: int, group: int) -> None:
    assert wide_group(columns) == group


def test_int8_is_one_path_and_an_unknown_word_is_refused() -> None:
    assert load_kind("int8", "fast") is load_kind("int8", "invariant")
    with pytest.raises(UnknownName, match="did you mean: fast"):
        load_kind("int8", "fastest")  # pyright: ignore[reportArgumentType]


def test_the_check_covers_every_path_and_finds_nothing() -> None:
    found = check_weights()
    assert {f.weights for f in found} == set(KINDS)
    assert all(f.ok for f in found), [f for f in found if not f.ok]
    many = {(f.weights, f.numerics): f.error for f in found if f.rows > 1}
    assert many["float32", "invariant"] < 1e-5 < many["bfloat16", "invariant"] < many["native", "invariant"]
    assert many["native", "invariant"] < many["native", "fast"] < 0.02


@pytest.mark.parametrize("name", ["native", "int4"])
def test_second_forms_keep_within_their_memory(name: str) -> None:
    raw, spec = Blocks(), LinearSpec((("a", ROWS),), COLUMNS)
    each = wide_bytes(ROWS, COLUMNS)
    x = torch.randn(MANY_ROWS, COLUMNS, generator=torch.Generator().manual_seed(5)).bfloat16()
    invariant, free = load_kind(name).linear(spec, raw), load_kind(name, "fast").linear(spec, raw)
    room = WeightRoom(second_bytes=2 * each + each // 2)
    made = [load_kind(name, "fast").linear(spec, raw, room) for _ in range(4)]
    assert [torch.equal(product(x), free(x)) for product in made] == [True, True, False, False]
    assert torch.equal(made[2](x), invariant(x))
    held = [sum(t.nbytes for t in product.tensors()) for product in made]
    assert held[0] - held[2] == each
