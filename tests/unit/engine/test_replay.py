"""A sequence that has to be computed again goes on as if nothing had happened: its policy decides the same again, at
the same lengths, from the same signals."""

from __future__ import annotations

from typing import Any

import pytest

from kvarn.core.requests import SamplingParams
from kvarn.kv.choice import parse_policy
from kvarn.kv.policies.base import policy_names
from support.engines import Watch, held_blocks, make_engine

PROMPT = list(b"round and round the millstone goes, and what it was")
PARAMS = (
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.2, seed=7, n=2),
)
POLICIES = tuple(n for n in policy_names() if n not in ("full", "tiered"))


def text_of(name: str) -> str:
    return f"{name}:16" if name == "window" else f"{name}:40%"


def run(policy: str, params: SamplingParams, repeats: tuple[int, ...] = (), **options: Any) -> list[tuple[int, ...]]:
    """Tokens of each answer; before these steps all that runs gives its blocks back."""
    engine = make_engine(grain="head", step_tokens=20, **options)
    watch = Watch(engine)
    engine.add_request("0", PROMPT, params, policy=parse_policy(policy))
    for step in range(200):
        if not engine.has_work:
            break
        if step in repeats:
            for completion in engine.request("0").completions:
                if completion.seq_id in engine.cache.sequences:  # pyright: ignore[reportAttributeAccessIssue]
                    engine.scheduler.restart(completion.seq_id)
        watch.step()
    assert held_blocks(engine) == 0 and not engine.has_work
    return [c.token_ids for c in watch.outputs["0"].completions]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("repeats", [(2,), (5,), (9, 24), (30, 31)], ids=str)
def test_what_is_computed_again_is_decided_again(name: str, params: SamplingParams, repeats: tuple[int, ...]) -> None:
    expected = run(text_of(name), params)
    assert run(text_of(name), params, repeats) == expected


@pytest.mark.parametrize("name", ["h2o", "scissorhands", "knorm", "window"])
def test_a_pool_too_small_for_all_changes_no_tokens(name: str) -> None:
    """Real preemptions: five such requests at once in blocks for about two."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    policy = "window:64" if name == "window" else f"{name}:95%,recent=4"

    def engine(blocks: int) -> Watch:
        watch = Watch(make_engine(grain="head", step_tokens=20, max_seqs=5, blocks=blocks))
        for i in range(5):
            watch.engine.add_request(str(i), PROMPT[i : i + 14], params, policy=parse_policy(policy))
        watch.finish()
        return watch

    small, large = engine(84), engine(1000)
    assert small.preemptions and not large.preemptions
    for request_id, output in large.outputs.items():
        assert small.outputs[request_id].completions[0].token_ids == output.completions[0].token_ids
