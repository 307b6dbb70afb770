"""A text that a policy has the model read again goes through the steps as a prompt does: others decode meanwhile, and
however it is divided, it gives the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvarn.core.requests import SamplingParams
from kvarn.engine import rereading
from kvarn.engine.engine import Engine
from kvarn.engine.pacing import Pace
from kvarn.engine.prices import Allowance, TokenAllowance
from kvarn.engine.rereading import Reading, read_again_where_due
from kvarn.kv.manager import CacheManager
from kvarn.kv.policies.full import Full
from support.engines import Watch, block_bytes, make_engine
from support.models import byte_tokenizer, tiny_model

TEXT = [(11 * i * i + 5 * i) % 250 for i in range(60)]
OTHER = list(b"the wheel goes round")
PARTS = 3


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rereading, "CHUNK_TOKENS", len(TEXT) // PARTS)


class Few(Pace):
    """Beside rows that decode, as much as four tokens of a prompt cost."""

    def __init__(self) -> None:
        super().__init__(2.0)

    def allowance(self, decodes: int) -> Allowance:
        return TokenAllowance(4)


def engine(*, blocks: int | None = None) -> Engine:
    asked = {"policy": "kvzip:24,sinks=2", "grain": "head", "step_tokens": 256, "max_seqs": 8}
    made = make_engine("llama", **asked, blocks=blocks) if blocks else make_engine("llama", **asked)
    made.scheduler.config = replace(made.scheduler.config, short_tokens=1)
    made.scheduler.pace = Few()
    return made


def asked(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def reread(cache: object) -> tuple[np.ndarray | None, ...]:
    assert isinstance(cache, CacheManager)
    return next(s.reread for s in cache.sequences.values() if s.token_ids[: len(TEXT)] == TEXT)


def alone() -> tuple[tuple[int, ...], tuple[np.ndarray | None, ...]]:
    """The answer, and what reading again noted, where nobody else runs: each part in one go."""
    watch = Watch(engine())
    watch.engine.add_request("text", TEXT, asked(12))
    noted: tuple[np.ndarray | None, ...] = ()
    while watch.engine.has_work:
        watch.step()
        if watch.engine.has_work:
            noted = reread(watch.engine.cache) or noted
    return tuple(watch.outputs["text"].completions[0].token_ids), noted


def test_others_decode_while_a_text_is_read_again() -> None:
    expected, noted = alone()
    watch = Watch(engine())
    watch.engine.add_request("other", OTHER, asked(100), policy=Full())
    while not watch.engine.request("other").completions[0].token_ids:
        watch.step()
    watch.engine.add_request("text", TEXT, asked(12))
    steps, found = 0, tuple[np.ndarray | None, ...]()
    while "text" not in watch.outputs:
        result = watch.step()
        if result.plan.again:
            steps += 1
            assert len(result.plan.again) == 1 and result.plan.rows, "the other one decodes beside it"
            assert sum(len(d.token_ids) for d in result.deltas if d.request_id == "other") == 1
            assert not any(d.request_id == "text" for d in result.deltas), "it goes on when its policy has decided"
        if "text" not in watch.outputs:
            found = found or reread(watch.engine.cache) if steps else found
    assert steps > PARTS, "no part went through all layers in one step"
    assert tuple(watch.outputs["text"].completions[0].token_ids) == expected
    assert len(found) == len(noted)
    for mine, theirs in zip(found, noted, strict=True):
        assert mine is not None and theirs is not None
        np.testing.assert_array_equal(mine, theirs)


def test_layer_by_layer_gives_the_bits_of_one_go() -> None:
    model, notes = tiny_model("llama"), []
    for layers in (None, 1):
        made = Watch(engine())
        cache = made.engine.cache
        assert isinstance(cache, CacheManager)
        made.engine.add_request("text", TEXT, asked(2))
        while not cache.sequences or not cache.sequences[0].token_ids:
            made.step()
        if layers is None:
            read_again_where_due(model, cache, 0, byte_tokenizer())
        else:
            reading, at = Reading(model, cache, 0, byte_tokenizer()), 0
            assert len(reading.part_tokens) == PARTS
            while not reading.go_on(at % len(model.layers) + 1):
                at += 1
            assert at + 1 == PARTS * len(model.layers)
        notes.append(cache.sequences[0].reread)
    for one_go, by_layers in zip(*notes, strict=True):
        np.testing.assert_array_equal(one_go, by_layers)


def test_several_answers_decide_before_they_part() -> None:
    watch = Watch(engine())
    watch.engine.add_request("text", TEXT, replace(asked(12), n=2))
    while watch.engine.has_work:
        assert not watch.step().plan.again
    assert {tuple(c.token_ids) for c in watch.outputs["text"].completions} == {alone()[0]}


def test_a_text_that_is_cancelled_or_ends_meanwhile_leaves_nothing() -> None:
    watch = Watch(engine())
    watch.engine.add_request("text", TEXT, asked(12))
    while not watch.step().plan.again:
        pass
    watch.engine.cancel("text")
    watch.engine.add_request("short", TEXT, asked(1))
    while watch.engine.has_work:
        watch.step()
    assert not watch.engine._readings
    assert isinstance(watch.engine.cache, CacheManager) and not watch.engine.cache.sequences


def test_a_text_that_is_preempted_meanwhile_is_read_again_from_its_beginning() -> None:
    expected, _ = alone()
    tight = make_engine(
        "llama",
        policy="kvzip:24,sinks=2",
        grain="head",
        step_tokens=256,
        max_seqs=8,
        kv_memory_bytes=26 * block_bytes(tiny_model("llama")),
    )
    tight.scheduler.config = replace(tight.scheduler.config, short_tokens=1, growth_tokens=0)
    tight.scheduler.pace = Few()
    watch = Watch(tight)
    for name in ("a", "b", "c"):
        watch.engine.add_request(name, TEXT, asked(12))
    while watch.engine.has_work:
        watch.step()
    for name in ("a", "b", "c"):
        assert tuple(watch.outputs[name].completions[0].token_ids) == expected
    assert not watch.engine._readings
