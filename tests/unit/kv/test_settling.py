"""Requests of one batch in different formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvarn.core.cache_params import CacheParams
from kvarn.core.errors import IncompatiblePlan
from kvarn.core.requests import SamplingParams
from kvarn.kv.choice import parse_choice
from kvarn.kv.manager import CacheManager
from support.engines import SMALL, Watch, block_bytes, held_blocks, make_engine, serve
from support.models import tiny_model

PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(45)]
ANSWER = SamplingParams(max_tokens=30, ignore_eos=True)
CHOICES = ("full", "int8", "fp8_e4m3,residual=8", "h2o:16,recent=4", "int8,residual=0")


def answers(choices: tuple[str, ...]) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """Token ids, and each request's bytes at its end."""
    engine, watch = make_engine(also=CHOICES, residual_tokens=4), None
    watch = Watch(engine)
    for text in choices:
        engine.add_request(text, PROMPT, ANSWER, cache=parse_choice(text))
    watch.finish()
    found = {t: watch.outputs[t].completions[0] for t in choices}
    return [c.token_ids for c in found.values()], {t: c.trace.physical_bytes for t, c in found.items() if c.trace}


def test_a_batch_of_formats_is_each_alone() -> None:
    together, held = answers(CHOICES)
    assert together == [answers((choice,))[0][0] for choice in CHOICES]
    assert held["full"] > held["fp8_e4m3,residual=8"] > held["int8,residual=0"] * 0.8
    assert held["int8,residual=0"] < 0.5 * held["full"]


def test_blocks_lie_in_the_pools_of_their_formats() -> None:
    engine = make_engine(also=("int8",), residual_tokens=8)
    engine.add_request("a", PROMPT, ANSWER, cache=parse_choice("int8"))
    cache, seen = engine.cache, 0
    assert isinstance(cache, CacheManager)
    while engine.has_work:
        engine.step()
        cache.check()
        (group,) = cache.groups
        assert [v.format.name for v in group.views] == ["float32", "int8"]
        for state in cache.sequences.values():
            if state.length > len(PROMPT):
                counts = [n.total() for n in group.named([state.rows[0]])]
                assert counts[1] >= (state.length - 8) // 4 - 1
                seen += 1
    assert seen


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("int4", "no pool of int4; this engine has float32, int8"),
        ("h2o:25%+int8", "int8 goes with the policy full"),
        ("float32,residual=99", "residual of 99 tokens; this engine's is 32"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(asked: str, said: str) -> None:
    engine = make_engine(also=("int8",), residual_tokens=32)
    with pytest.raises(IncompatiblePlan, match=said):
        engine.add_request("a", PROMPT, ANSWER, cache=parse_choice(asked))
    assert not engine.has_work


ORDERS = [("full", "int8"), ("int8", "full"), ("int8", "fp8_e4m3,residual=8"), ("int8", "window:16,sinks=4")]


@pytest.mark.parametrize(("first", "second"), ORDERS, ids=str)
def test_formats_and_pure_policies_find_each_others_prompts(first: str, second: str) -> None:
    """A prompt is computed in full precision whatever becomes of its blocks, so either leaves it to the other."""
    alone = {text: answers((text,))[0][0] for text in (first, second)}
    engine = make_engine(also=CHOICES, residual_tokens=4)
    watch = Watch(engine)
    for text in (first, second):
        engine.add_request(text, PROMPT, ANSWER, cache=parse_choice(text))
        watch.finish()
    assert watch.outputs[first].cached_tokens == 0
    assert watch.outputs[second].cached_tokens == len(PROMPT) - 1
    for text, tokens in alone.items():
        assert watch.outputs[text].completions[0].token_ids == tokens
    assert held_blocks(engine) == 0


def test_what_was_decided_stays_with_its_request() -> None:
    """What an int8 request generated was read from int8 blocks: another's identical text does not begin with it."""
    engine = make_engine(also=CHOICES, residual_tokens=4)
    watch = Watch(engine)
    engine.add_request("a", PROMPT, ANSWER, cache=parse_choice("int8"))
    watch.finish()
    text = (*PROMPT, *watch.outputs["a"].completions[0].token_ids)
    engine.add_request("b", text, ANSWER)
    watch.finish()
    assert watch.outputs["b"].cached_tokens == len(PROMPT) // 4 * 4
    alone = serve(make_engine(), [(text, ANSWER)]).outputs["0"]
    assert watch.outputs["b"].completions[0].token_ids == alone.completions[0].token_ids


def test_a_policy_that_reads_the_prompt_says_why_nothing_was_found() -> None:
    engine = make_engine(also=CHOICES)
    watch = Watch(engine)
    for name in ("a", "b"):
        engine.add_request(name, PROMPT, ANSWER, cache=parse_choice("h2o:16,recent=4"))
        watch.finish()
    trace = watch.outputs["b"].completions[0].trace
    assert trace is not None and trace.cached_tokens == 0
    assert trace.prefix == "the policy h2o reads what the whole prompt attends to, so all of it is computed"


def test_a_small_cache_changes_no_token_of_what_settles() -> None:
    """Each block that is to settle finds room: others are preempted for it, if need be."""
    found = []
    for blocks in (None, 24):
        asked: dict[str, Any] = {
            "also": ("int4",),
            "block_size": 8,
            "max_seqs": 8,
            "step_tokens": 64,
            "prefix_caching": False,
        }
        small = replace(SMALL, **asked)
        room: dict[str, Any] = (
            {} if blocks is None else {"kv_memory_bytes": blocks * block_bytes(tiny_model("llama"), small)}
        )
        watch = Watch(make_engine(**asked, **room))
        for i in range(8):
            ids = [(7 * i + 3 * j) % 90 + 10 for j in range(25 + i)]
            params = SamplingParams(max_tokens=60, ignore_eos=True, n=1 + (i == 3), temperature=0.5, seed=i)
            watch.engine.add_request(str(i), ids, params, cache=CacheParams("int4"))
        watch.finish()
        outputs = [watch.outputs[str(i)].completions for i in range(8)]
        found.append([(c.token_ids, c.trace and c.trace.bytes_by_format) for each in outputs for c in each])
        assert (blocks is None) == (not watch.preemptions)
    assert found[0] == found[1]
