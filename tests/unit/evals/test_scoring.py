"""A replay sees the cache that decoding token by token sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvarn.core.errors import InvalidRequest
from kvarn.core.requests import SamplingParams
from kvarn.engine.engine import Engine
from kvarn.evals.scoring import Known, Scorer
from support.engines import make_engine
from support.models import VOCAB

IDS = [(i * 37 + i * i) % 250 for i in range(90)]
CHOICES = (
    "full",
    "int8",
    "int8,residual=8",
    "k=int8,v=int4",
    "window:16",
    "window:16,sinks=4",
    "h2o:24",
    "tova:24,recent=4",
    "snapkv:24,recent=8,query_tokens=4",
    "h2o:24+int8",
    "keydiff:25%,recent=4",
    "knorm:40%,recent=4+int8,residual=8",
    "tova:40%+fp8_e4m3,residual=8",
    "adakv:40%,query_tokens=4+int8,residual=8",
)


class Forced:
    """Lets only these tokens come, one after the other."""

    error = None

    def __init__(self, ids: list[int]) -> None:
        self._ids, self._at = ids, 0

    @property
    def done(self) -> bool:
        return self._at == len(self._ids)

    def fork(self) -> Forced:
        return self

    def allowed(self) -> Tensor:
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[self._ids[self._at]] = True
        return mask

    def accept(self, token_id: int) -> None:
        assert token_id == self._ids[self._at]
        self._at += 1


def decoded(engine: Engine, prompt: list[int], forced: list[int]) -> list[float]:
    """Log-probabilities of the forced tokens, decoded one a step."""
    params = SamplingParams(max_tokens=len(forced), ignore_eos=True, logprobs=0)
    engine.add_request("forced", prompt, params, guide=Forced(forced))
    while engine.has_work:
        result = engine.step()
        engine.cache.check()
    (output,) = result.finished
    logprobs = output.completions[0].logprobs
    assert logprobs is not None
    return [p.logprob for p in logprobs]


@pytest.mark.parametrize("prompt_tokens", [41, 48])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_replay_scores_as_decoding_does(choice: str, prompt_tokens: int) -> None:
    prompt, rest = IDS[:prompt_tokens], IDS[prompt_tokens:]
    scorer = Scorer(make_engine(kv=choice, block_size=8))
    found = scorer.score(prompt, rest)
    assert found.logprobs.tolist() == pytest.approx(
        decoded(make_engine(kv=choice, block_size=8), prompt, rest), abs=2e-5
    )


def test_a_second_text_scores_as_the_first() -> None:
    """Few open blocks, many sealed ones, and a table in which the first text's blocks stood."""
    scorer = Scorer(make_engine(kv="int8", block_size=4, step_tokens=16, max_seqs=1))
    first, second = (scorer.score(IDS[:30], IDS[30:]).logprobs.tolist() for _ in range(2))
    assert first == second


def test_what_is_unseen_is_kept_from_the_policy() -> None:
    """The policy decides after the prompt; so scoring the end alone after a longer replay is another thing than a
    longer prompt."""
    engine = make_engine(kv="tova:16,recent=4", block_size=8)
    unseen = Scorer(engine).score(IDS[:48], IDS[48:60], scored=4)
    seen = Scorer(engine).score(IDS[:56], IDS[56:60])
    full = Scorer(make_engine(kv="full", block_size=8))
    assert unseen.logprobs.tolist() != pytest.approx(seen.logprobs.tolist(), abs=1e-4)
    assert full.score(IDS[:48], IDS[48:60], scored=4).logprobs.tolist() == pytest.approx(
        full.score(IDS[:56], IDS[56:60]).logprobs.tolist(), abs=1e-5
    )


def test_usage_is_what_the_cache_held() -> None:
    full, few = Scorer(make_engine(kv="full", block_size=8)), Scorer(make_engine(kv="window:16", block_size=8))
    full.score(IDS[:72], IDS[72:])
    few.score(IDS[:72], IDS[72:])
    block = full.usages[0].held_bytes // 12  # 90 tokens are 12 blocks of 8
    assert full.usages[0].held_bytes == full.usages[0].peak_bytes == 12 * block
    assert few.usages[0].held_bytes <= 4 * block
    assert few.usages[0].peak_bytes >= 9 * block  # the prompt is attended in full
    assert few.usages[0].tokens == 90


def test_greedy_tokens_are_an_exact_match() -> None:
    engine = make_engine()
    engine.add_request("greedy", IDS[:20], SamplingParams(max_tokens=6, ignore_eos=True))
    while engine.has_work:
        result = engine.step()
    answer = list(result.finished[0].completions[0].token_ids)
    assert Scorer(engine).score(IDS[:20], answer).exact
    assert not Scorer(engine).score(IDS[:20], [*answer[:-1], (answer[-1] + 1) % 250]).exact


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nothing to score"):
        Scorer(make_engine()).score(IDS[:4], [])


def test_what_is_known_of_a_choice_is_not_computed_again() -> None:
    """Two tasks read the same windows, each in an engine of its own."""
    known: Known = {}
    ticks: list[int] = []
    first, second = (Scorer(make_engine(kv="int8", block_size=8), ticks.append, known) for _ in range(2))
    scores = first.score(IDS[:48], IDS[48:])
    computed = sum(ticks)
    again = second.score(IDS[:48], IDS[48:])
    assert sum(ticks) == computed
    assert again.logprobs.tolist() == scores.logprobs.tolist() and second.usages == first.usages
    second.score(IDS[:40], IDS[40:])
    assert sum(ticks) > computed
