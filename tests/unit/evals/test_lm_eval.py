"""The adapter for lm-eval; its own evaluator is not needed for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvarn import LLM
from support.models import write_model_directory

adapter = pytest.importorskip("kvarn.evals.lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)
TEXT = "The quick brown fox jumps over the lazy dog and "


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_model_directory(tmp_path_factory.mktemp("model")), weights="float32", context_tokens=128)


def asked(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def test_a_continuation_scores_as_the_prompt_does(llm: LLM) -> None:
    lm = adapter.KvarnLM(llm)
    ((found, _),) = lm.loglikelihood([asked(TEXT, "runs away")])
    output = llm.generate(TEXT + "runs away", max_tokens=1, prompt_logprobs=0)[0]
    assert output.prompt_logprobs is not None
    begin = len(TEXT.rstrip().encode())
    assert found == pytest.approx(sum(p.logprob for p in output.prompt_logprobs[begin:] if p), abs=1e-3)


def test_what_is_generated_is_greedy(llm: LLM) -> None:
    lm = adapter.KvarnLM(llm)
    how = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False}
    first, second = lm.generate_until([asked(TEXT, how), asked("A", how)])
    assert first == llm.generate(TEXT, max_tokens=6, stop=("\n\n",))[0].completions[0].text
    assert second == llm.generate("A", max_tokens=6, stop=("\n\n",))[0].completions[0].text


def test_a_text_longer_than_the_context_is_read_whole(llm: LLM) -> None:
    lm = adapter.KvarnLM(llm)
    short, long = lm.loglikelihood_rolling([asked(TEXT), asked(TEXT * 8)])
    assert long < 4 * short < 0
    ((found, _),) = lm.loglikelihood([asked(TEXT * 8, "x")])
    assert found < 0
    ((from_nothing, _),) = lm.loglikelihood([asked("", "x")])
    assert from_nothing < 0
