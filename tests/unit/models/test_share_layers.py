"""Neighbouring layers on one cache: what a model so changed computes, what it saves, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.requests import SamplingParams
from kvarn.core.specs import LayerKind, LayerSpec, share_layers
from kvarn.kernels.api import AttendParams, Rope
from kvarn.kv.manager import CacheManager
from kvarn.kv.view import StepInputs
from kvarn.models.base import CausalLM
from kvarn.models.loading.load import build_model, load_kind
from support.dense import KERNELS
from support.engines import make_engine, serve
from support.models import CONFIGS, random_source

PLAIN = LayerSpec(2, 8, 8, 4)
CONFIG = {**CONFIGS["llama"], "num_hidden_layers": 4}
PROMPT = [(5 * i * i + i) % 250 for i in range(23)]


def model_of(n: int) -> CausalLM:
    return build_model(CONFIG, random_source(CONFIG), load_kind("float32"), n)


@dataclass
class Shared:
    """Attention over whole texts, in which layers read what the run's first layer made."""

    n: int
    made: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    index: int = 0

    def layer(self, index: int) -> Shared:
        self.index = index
        return self

    def plain(self) -> None:
        return None

    def append_and_attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, rope: Rope | None, params: AttendParams
    ) -> Tensor:
        assert rope is not None
        first = self.index - self.index % self.n
        if k is not None and v is not None:
            assert first == self.index
            self.made[first] = KERNELS.rope(k, rope), v
        keys, values = (x.repeat_interleave(2, dim=1) for x in self.made[first])
        scores = torch.einsum("qhd,khd->hqk", KERNELS.rope(q, rope), keys) * params.scale
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(later, -torch.inf), -1)
        return torch.einsum("hqk,khd->qhd", weights, values).contiguous()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_engine_computes_what_dense_attention_does(n: int) -> None:
    model = model_of(n)
    text = list(PROMPT)
    for _ in range(20):
        with torch.inference_mode():
            step = StepInputs(torch.tensor(text), torch.arange(len(text)), KERNELS)
            text.append(int(model.logits(model.forward(step, Shared(n)))[-1].argmax()))
    engine = make_engine(model)
    watch = serve(engine, [(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))])
    assert list(watch.outputs["0"].completions[0].token_ids) == text[len(PROMPT) :]
    assert isinstance(engine.cache, CacheManager)
    assert len(engine.cache.groups[0].layers) == 4 // n
    assert engine.cache.plan.bytes_per_token == 4 // n * 2 * 2 * 8 * 4


def test_policies_and_formats_compose_with_it() -> None:
    engine = make_engine(model_of(2), kv="h2o:16,recent=4+int8", residual_tokens=4)
    watch = serve(engine, [(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))])
    assert len(watch.outputs["0"].completions[0].token_ids) == 20


def test_specs() -> None:
    shared = share_layers((PLAIN,) * 6, 3)
    assert [s.shares_layer for s in shared] == [None, 0, 0, None, 3, 3]
    assert [s.kind for s in shared[:2]] == [LayerKind.ATTENTION, LayerKind.SHARED]
    assert share_layers((PLAIN,) * 6, 1) == (PLAIN,) * 6


def test_refusals() -> None:
    with pytest.raises(IncompatiblePlan, match=r"--share-layers 4 does not divide 6 layers \(try: use 2, 3, 6\)"):
        share_layers((PLAIN,) * 6, 4)
    with pytest.raises(IncompatiblePlan, match="--share-layers 0"):
        share_layers((PLAIN,) * 6, 0)
    window = LayerSpec(2, 8, 8, 4, window_tokens=8)
    with pytest.raises(IncompatiblePlan, match="layers 0 to 1 do not keep the same"):
        share_layers((PLAIN, window) * 2, 2)
