"""The oracle at run time."""

from __future__ import annotations

import pytest

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.requests import SamplingParams
from kvarn.engine.engine import Engine
from support.engines import make_engine, serve

PROMPT = [(i * 37) % 250 for i in range(50)]
LONG = SamplingParams(max_tokens=50, ignore_eos=True)


def verified(engine: Engine, n: int = 1):
    serve(engine, [(PROMPT[i:], LONG) for i in range(n)])
    assert engine.verifier is not None
    return engine.verifier.report


def test_a_full_cache_agrees_with_itself() -> None:
    report = verified(make_engine(verify=1.0))
    assert report.steps == 49  # the last token is never fed, the first comes with the prompt
    assert report.kl == pytest.approx(0.0, abs=1e-9)
    assert report.top1_agreement == 1.0


@pytest.mark.parametrize("kv", ["int4", "window:8"])
def test_a_lossy_cache_differs(kv: str) -> None:
    report = verified(make_engine(kv=kv, block_size=8, verify=1.0))
    assert report.steps == 49
    assert report.kl_max >= report.kl > 1e-6
    assert 0 <= report.top1_agreement <= 1


def test_only_the_share_is_compared() -> None:
    report = verified(make_engine(verify=0.2), n=8)
    assert 0.1 * 8 * 49 < report.steps < 0.3 * 8 * 49


def test_answers_are_the_same_with_and_without() -> None:
    asked = [(PROMPT, LONG), (PROMPT[:9], SamplingParams(max_tokens=20, n=2, temperature=1.0, seed=5))]
    plain, watched = (
        serve(make_engine(kv="int8", block_size=8), asked),
        serve(make_engine(kv="int8", block_size=8, verify=0.5), asked),
    )
    for key, output in plain.outputs.items():
        assert [c.token_ids for c in output.completions] == [c.token_ids for c in watched.outputs[key].completions]


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(IncompatiblePlan, match="share"):
        make_engine(verify=share)
