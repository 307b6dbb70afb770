"""`--numerics invariant`, whole engine, every kind of weights: log-probabilities are the same bit for bit alone and in
any batch, at any chunk size, with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn.core.formats import format_names
from kvarn.core.registry import names_in
from kvarn.core.requests import SamplingParams
from kvarn.kernels import load_backend
from kvarn.models.base import CausalLM
from kvarn.models.loading.load import build_model, load_kind
from kvarn.models.weights.base import RawBlocks
from support.engines import make_engine, serve
from support.models import CONFIGS, RandomSource, random_source

KINDS = names_in("kvarn.models.weights")
# More than 1,024 columns, where a product of a single row may be summed in pieces.
CONFIG = {**CONFIGS["llama"], "hidden_size": 64, "intermediate_size": 1056}
TEXT = list(
    b"The mill turns, the water falls, and grain by grain the day goes by: the miller sleeps, the mill does not."
)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0)
Scores = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]

pytestmark = pytest.mark.skipif(
    load_backend().name != "cpu", reason="bit for bit is the native kernels' promise; they are not built here"
)


class Quantized(RandomSource):
    """The same numbers as a file of Q8_0 holds them."""

    def raw(self, name: str) -> RawBlocks | None:
        numbers = self.tensor(name)
        if numbers.dim() == 1:
            return None
        return RawBlocks("Q8_0", torch.from_numpy(gguf.quantize(numbers.numpy(), gguf.GGMLQuantizationType.Q8_0)))


@cache
def model_of(weights: str) -> CausalLM:
    plain = random_source(CONFIG)
    source = Quantized(plain._shapes) if weights == "native" else plain
    return build_model(CONFIG, source, load_kind(weights))


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def scores(weights: str, kv: str, prompts: list[list[int]], step_tokens: int, threads: int) -> list[Scores]:
    """Tokens and log-probabilities of each answer, and of its prompt."""
    torch.set_num_threads(threads)
    engine = make_engine(
        model_of(weights), kv=kv, weights=weights, block_size=8, step_tokens=step_tokens, prefix_caching=False
    )
    watch = serve(engine, [(ids, PARAMS) for ids in prompts])
    found = []
    for index in range(len(prompts)):
        output = watch.outputs[str(index)]
        (answer,) = output.completions
        prompt = tuple(p.logprob for p in output.prompt_logprobs or () if p is not None)
        found.append((answer.token_ids, tuple(p.logprob for p in answer.logprobs or ()), prompt))
    return found


@cache
def alone(weights: str, kv: str, begin: int, length: int) -> Scores:
    return scores(weights, kv, [TEXT[begin : begin + length]], 512, 1)[0]


@pytest.mark.parametrize("weights", KINDS)
@settings(max_examples=8)
@given(
    kv=st.sampled_from(["bfloat16", "float32", *(n for n in format_names() if n in ("int8", "int4", "turbo3"))]),
    parts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 70)), min_size=1, max_size=4),
    step_tokens=st.sampled_from([1, 7, 16, 65, 512]),
    threads=st.sampled_from([1, 2]),
)
def test_batch_chunks_and_threads_change_no_bit(
    weights: str, kv: str, parts: list[tuple[int, int]], step_tokens: int, threads: int
) -> None:
    prompts = [TEXT[begin : begin + length] for begin, length in parts]
    together = scores(weights, kv, prompts, step_tokens, threads)
    assert together == [alone(weights, kv, begin, length) for begin, length in parts]
