"""What a decode step reads, in numbers and as a line."""

from __future__ import annotations

import pytest
import torch

from kvarn.core.requests import SamplingParams
from kvarn.engine.report import DecodeReads, decode_reads
from kvarn.models.loading.load import build_model, load_kind
from support.engines import make_engine, serve
from support.models import CONFIGS, random_source, tiny_model

PARAMS = SamplingParams(max_tokens=9, ignore_eos=True)


def test_share_is_the_least_time_over_the_time_taken() -> None:
    found = DecodeReads(90_000_000, 10_000_000, 0.02, 20e9)
    assert found.step_bytes == 100_000_000 and found.limit_s == pytest.approx(0.005)
    assert found.share == pytest.approx(0.25) == found.as_dict()["share"]
    assert found.line() == (
        "a decode step reads 100.0 MB (weights 90.0, cache 10.0); at 20.0 GB/s that is 5.00 ms, it took 20.00 ms: 25% "
        "of the memory's speed"
    )


def test_what_is_not_known_is_said() -> None:
    unmeasured, no_step = DecodeReads(90, 10, 0.02), DecodeReads(90, 10, 0.0, 20e9)
    assert unmeasured.share is None and "unknown" in unmeasured.line()
    assert no_step.share is None and "took" not in no_step.line()


def test_cache_bytes_are_what_a_full_cache_holds() -> None:
    engine = make_engine()
    serve(engine, [(list(range(40)), PARAMS)])
    found = decode_reads(tiny_model(), engine.cache, 40 + 4, 0.01)
    assert found.cache_bytes == 44 * engine.cache.plan.bytes_per_token
    assert found.weight_bytes == tiny_model().step_weight_bytes


def test_no_more_is_read_than_was_held() -> None:
    engine = make_engine(kv="window:8")
    serve(engine, [(list(range(40)), PARAMS)])
    assert decode_reads(tiny_model(), engine.cache, 4000, 0.01).cache_bytes <= engine.cache.peak.physical_bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_weights_that_a_step_reads(weights: str, tied: bool) -> None:
    """All matrices and norms once; the embedding only where it is the output's matrix; no second form."""
    config = {**CONFIGS["llama"], "tie_word_embeddings": tied, "hidden_size": 64, "intermediate_size": 96}
    source = random_source(config)
    invariant, fast = (build_model(config, source, load_kind(weights, n)) for n in ("invariant", "fast"))
    numbers = {name: t for name, t in source.tensors().items() if tied or "embed_tokens" not in name}
    norms = sum(t.numel() for t in numbers.values() if t.dim() == 1) * torch.float32.itemsize
    matrices = sum(t.numel() for t in numbers.values() if t.dim() == 2)
    if weights == "float32":
        assert invariant.step_weight_bytes == norms + 4 * matrices
    else:
        assert norms + 0.6 * matrices < invariant.step_weight_bytes < norms + 1.2 * matrices
        assert fast.weight_bytes > invariant.weight_bytes
    assert fast.step_weight_bytes == invariant.step_weight_bytes
