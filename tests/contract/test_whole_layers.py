"""All layers in one native call give the bits that they give one by one, whatever the architecture and the threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvarn.core.requests import SamplingParams
from kvarn.kernels import load_backend
from kvarn.models.base import SHARE_LAYERS, CausalLM
from kvarn.models.loading.load import build_model, load_kind
from support.engines import Watch, make_engine, serve
from support.models import BASE, CONFIGS, random_source

pytestmark = pytest.mark.skipif(load_backend().name != "cpu", reason="the native kernels are not built here")

FOUR = {**BASE, "num_hidden_layers": 4, "rope_theta": 1e4}
CASES: dict[str, dict[str, Any]] = {
    **CONFIGS,
    "mistral, a window": {**FOUR, "model_type": "mistral", "sliding_window": 6},
    "qwen2, biases": {**FOUR, "model_type": "qwen2"},
    "qwen3, head norms": {**FOUR, "model_type": "qwen3", "head_dim": 16},
    "gemma2, soft caps": {**CONFIGS["gemma3"], "model_type": "gemma2"},
    "phi3": {**FOUR, "model_type": "phi3", "pad_token_id": 0},
    "llama, shared layers": {**FOUR, "model_type": "llama", SHARE_LAYERS: 2},
}
PROMPTS = [list(b"The mill turns, the water falls"), list(b"grain by grain"), list(b"x")]
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1, prompt_logprobs=0)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def model_of(case: str, weights: str) -> CausalLM:
    config = CASES[case]
    unshared = {key: value for key, value in config.items() if key != SHARE_LAYERS}
    return build_model(config, random_source(unshared), load_kind(weights))


def answers(watch: Watch) -> list[tuple[Any, ...]]:
    """Tokens and the exact log-probabilities of every request."""
    found = []
    for name in sorted(watch.outputs):
        output = watch.outputs[name]
        (completion,) = output.completions
        scores = tuple(p.logprob for p in completion.logprobs or ())
        found.append((completion.token_ids, scores, tuple(p.logprob for p in output.prompt_logprobs or () if p)))
    return found


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_layer_by_layer(
    case: str, weights: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(case, weights)
    asked = [(prompt, GREEDY) for prompt in PROMPTS]

    def served() -> list[tuple[Any, ...]]:
        return answers(serve(make_engine(model, weights=weights, kv="bfloat16", step_tokens=13), asked))

    whole = served()
    backend = load_backend()
    assert model._whole(backend, 1) is not None
    monkeypatch.setattr(CausalLM, "_whole", lambda self, kernels, rows: None)
    assert served() == whole


@pytest.mark.parametrize("case", CASES)
def test_rows_that_nobody_reads_change_nothing(case: str, threads: int) -> None:
    """Where no prompt is scored, the last layer ends after its attention for all but the last rows."""
    model = model_of(case, "int4")
    plain = replace(GREEDY, prompt_logprobs=None)

    def served(params: SamplingParams) -> list[tuple[Any, ...]]:
        engine = make_engine(model, weights="int4", kv="bfloat16", step_tokens=13)
        return [found[:2] for found in answers(serve(engine, [(prompt, params) for prompt in PROMPTS]))]

    assert served(plain) == served(GREEDY)


def test_float_weights_go_layer_by_layer() -> None:
    assert model_of("llama", "float32")._whole(load_backend(), 1) is None
