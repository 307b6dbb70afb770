"""A request gives the same tokens, and log-probabilities bit for bit, in every format and at every grain: alone, in a
batch, at any chunk size, on a prefix hit, after preemptions."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kvarn.core.formats import format_names
from kvarn.core.requests import SamplingParams
from kvarn.kernels import load_backend
from support.engines import Watch, layer_by_layer, make_engine, serve

BLOCK = 8
TEXT = list(
    b"The mill turns, the water falls, and grain by grain the day goes by: the miller sleeps, the mill does not."
)
FORMATS = [*format_names(), "k=int4,v=turbo3"]
MODELS = ["llama", "gemma3"]


def slow(value: int) -> Any:
    """A case that the quick subset leaves out."""
    return pytest.param(value, marks=pytest.mark.slow)


def slow_pair(*values: int) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


GREEDY = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=1, prompt_logprobs=0)
Answer = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]

pytestmark = pytest.mark.skipif(
    load_backend().name != "cpu", reason="bit for bit is the native kernels' promise; they are not built here"
)


def engine_of(model: str, kv: str, **options: Any) -> Any:
    return make_engine(model, **{"kv": kv, "block_size": BLOCK, "weights": "float32", "step_tokens": 512, **options})


def answer_of(watch: Watch, name: str) -> Answer:
    output = watch.outputs[name]
    (completion,) = output.completions
    scores = tuple(p.logprob for p in output.prompt_logprobs or () if p is not None)
    return completion.token_ids, tuple(p.logprob for p in completion.logprobs or ()), scores


@cache
def alone(model: str, kv: str, length: int) -> Answer:
    return answer_of(serve(engine_of(model, kv, prefix_caching=False), [(TEXT[:length], GREEDY)]), "0")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("step_tokens", [slow(1), 5, slow(BLOCK), BLOCK + 1, slow(31)])
def test_any_chunking(step_tokens: int, kv: str, model: str) -> None:
    watch = serve(engine_of(model, kv, step_tokens=step_tokens, prefix_caching=False), [(TEXT[:67], GREEDY)])
    assert answer_of(watch, "0") == alone(model, kv, 67)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("residual_tokens", [3, BLOCK, 20])
@pytest.mark.parametrize("step_tokens", [1, 13, 512])
def test_any_chunking_with_a_residual(step_tokens: int, residual_tokens: int, model: str) -> None:
    def answer(step: int) -> Answer:
        engine = engine_of(model, "int4", step_tokens=step, residual_tokens=residual_tokens)
        return answer_of(serve(engine, [(TEXT[:61], GREEDY)]), "0")

    assert answer(step_tokens) == answer(29)


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("grain", ["layer", "head"])
def test_any_grain(grain: str, kv: str) -> None:
    watch = serve(engine_of("llama", kv, grain=grain, step_tokens=11), [(TEXT[:67], GREEDY)])
    assert answer_of(watch, "0") == alone("llama", kv, 67)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv", FORMATS)
def test_in_a_batch(kv: str, model: str) -> None:
    lengths = [BLOCK - 1, BLOCK, BLOCK + 1, 3, 40, 67]
    watch = serve(engine_of(model, kv, step_tokens=40, prefix_caching=False), [(TEXT[:n], GREEDY) for n in lengths])
    assert [answer_of(watch, str(i)) for i in range(len(lengths))] == [alone(model, kv, n) for n in lengths]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize(("tokens", "layers"), [(13, 1), slow_pair(BLOCK, 1), slow_pair(40, 1)])
def test_through_the_layers_in_several_steps(tokens: int, layers: int, kv: str, model: str) -> None:
    """Beside one that decodes, prompts go through some of the layers a step."""
    decoding = SamplingParams(max_tokens=60, ignore_eos=True)
    engine = layer_by_layer(engine_of(model, kv, prefix_caching=False), tokens, layers)
    watch = Watch(engine)
    engine.add_request("0", TEXT[:5], decoding)
    watch.step()
    engine.add_request("1", TEXT[:67], GREEDY)
    engine.add_request("2", TEXT[:40], GREEDY)
    watch.finish()
    parts = [r for s in watch.steps for r in s.plan.rows if not r.complete]
    assert len(parts) >= 3 and {r.seq_id for r in parts} == {1, 2}
    assert [answer_of(watch, str(i)) for i in (1, 2)] == [alone(model, kv, n) for n in (67, 40)]
    roomy = serve(engine_of(model, kv, prefix_caching=False), [(TEXT[:5], decoding)])
    assert answer_of(watch, "0") == answer_of(roomy, "0")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv", FORMATS)
def test_on_a_prefix_hit(kv: str, model: str) -> None:
    """Every split: the whole text is cached, then its beginnings are asked for."""
    engine = engine_of(model, kv)
    plain = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=1)
    serve(engine, [(TEXT[:67], plain)])
    watch, cached = Watch(engine), []
    lengths = [BLOCK + 1, 2 * BLOCK, 30, 60, 67]
    for length in lengths:
        engine.add_request(f"hit {length}", TEXT[:length], plain)
        watch.finish()
        cached.append(watch.outputs[f"hit {length}"].cached_tokens)
        assert answer_of(watch, f"hit {length}")[:2] == alone(model, kv, length)[:2]
    assert all(c >= (n - 1) // BLOCK * BLOCK for c, n in zip(cached, lengths, strict=True))


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("by_layers", [False, True])
def test_after_preemptions(by_layers: bool, kv: str) -> None:
    """A pool far too small for all, so that sequences lose their blocks and compute them again."""
    long = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=1)
    asked = [(TEXT[: 17 + i], long) for i in range(5)]
    small = engine_of("llama", kv, blocks=24, step_tokens=16, max_seqs=5, prefix_caching=False)
    watch = serve(layer_by_layer(small) if by_layers else small, asked)
    assert watch.preemptions > 0
    assert by_layers == any(r.layers is not None for s in watch.steps for r in s.plan.rows)
    roomy = serve(engine_of("llama", kv, prefix_caching=False), asked)
    assert [answer_of(watch, str(i)) for i in range(5)] == [answer_of(roomy, str(i)) for i in range(5)]
