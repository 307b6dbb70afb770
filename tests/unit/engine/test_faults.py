"""What goes wrong for one request ends that request: the others get the tokens that they get without it, and every
block comes back. Real exceptions, raised where a request is processed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from kvarn.core.requests import SamplingParams
from kvarn.engine.engine import Engine
from kvarn.kv.choice import parse_policy
from kvarn.kv.manager import CacheManager
from kvarn.kv.policies.base import Decision, KVPolicy, SequenceView
from support.engines import Watch, held_blocks, make_engine

PROMPT = list(b"The stone turns slowly.")
CULPRIT, TOKEN = "culprit", 253  # a token that only the culprit's prompt holds
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.2, seed=5)


class Broken(Exception):
    """What the tests raise."""


@dataclass(frozen=True)
class BrokenPolicy(KVPolicy):
    """Raises, or decides over places that there are not."""

    prefix_pure: ClassVar[bool] = True
    where: str = "decide"

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        if self.where == "due":
            raise Broken("due")
        return True

    def decide(self, view: SequenceView) -> Decision | None:
        if self.where == "decide":
            raise Broken("decide")
        return Decision((np.ones((9, 9), dtype=bool),) * len(view.groups))


@dataclass
class BrokenGuide:
    """Fails at one of its calls."""

    where: str
    done: bool = False
    error: str | None = None

    def fork(self) -> BrokenGuide:
        return self

    def allowed(self) -> Tensor | None:
        if self.where == "allowed":
            raise Broken("allowed")
        if self.where == "mask":
            return torch.ones(3, dtype=torch.bool)  # not as long as the vocabulary: the sampler raises
        return None

    def accept(self, token_id: int) -> None:
        if self.where == "accept":
            raise Broken("accept")


class BrokenStream:
    """A detokenizer that cannot go on, and cannot end."""

    stopped_by = None

    def push(self, ids: Sequence[int]) -> str:
        raise Broken("push")

    def finish(self) -> str:
        raise Broken("finish")


def watch(start: int, hidden: Tensor) -> None:
    raise Broken("watch")


def add_others(engine: Engine, rewriting: bool) -> list[str]:
    """Greedy, sampled, several answers, and one whose policy counts attention mass and drops tokens."""
    engine.add_request("greedy", PROMPT, GREEDY)
    engine.add_request("sampled", PROMPT[3:], SAMPLED)
    engine.add_request("several", PROMPT[5:], replace(SAMPLED, n=2))
    if rewriting:
        engine.add_request("h2o", PROMPT + PROMPT, GREEDY, policy=parse_policy("h2o:12,recent=4"))
        engine.add_request("tova", PROMPT + PROMPT[4:], GREEDY, policy=parse_policy("tova:12"))
    return [n for n in ("greedy", "sampled", "several", "h2o", "tova") if rewriting or n not in ("h2o", "tova")]


def break_calls(engine: Engine, name: str, is_culprit: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of the cache that does its work and then raises, where it is the culprit's turn."""
    method = getattr(engine.cache, name)

    def run_and_break(seq_id: int, *args: Any) -> Any:
        result = method(seq_id, *args)
        if is_culprit(seq_id):
            raise Broken(name)
        return result

    monkeypatch.setattr(engine.cache, name, run_and_break)


def break_sharing(engine: Engine, parent_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of this sequence fails when the tables have been written."""
    assert isinstance(engine.cache, CacheManager)
    (group,) = engine.cache.groups
    share, sequences = group.share_row, engine.cache.sequences

    def share_and_break(source: int, target: int) -> None:
        share(source, target)
        if (parent := sequences.get(parent_id)) is not None and parent.rows[0] == source:
            raise Broken("fork")

    monkeypatch.setattr(group, "share_row", share_and_break)


def break_forward(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = engine.model.forward

    def forward_or_break(inputs: Any, kv: Any) -> Tensor:
        hidden = forward(inputs, kv)  # what it wrote must not count
        if bool((inputs.token_ids == TOKEN).any()):
            raise Broken("forward")
        return hidden

    monkeypatch.setattr(engine.model, "forward", forward_or_break)


def break_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The culprit's hidden states are told by a mark that its forward pass leaves in them."""
    forward, logits = engine.model.forward, engine.model.logits

    def marked(inputs: Any, kv: Any) -> Tensor:
        hidden = forward(inputs, kv).clone()
        marked = inputs.token_ids == TOKEN
        hidden[marked if inputs.read_rows is None else marked[inputs.read_rows]] = torch.inf
        return hidden

    def logits_or_break(hidden: Tensor) -> Tensor:
        if bool(torch.isinf(hidden).any()):
            raise Broken("logits")
        return logits(hidden)

    monkeypatch.setattr(engine.model, "forward", marked)
    monkeypatch.setattr(engine.model, "logits", logits_or_break)


def add_culprit(engine: Engine, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, params, more = [*PROMPT, TOKEN], replace(GREEDY, n=2), dict[str, Any]()
    if stage in ("due", "decide", "shapes"):
        more["policy"] = BrokenPolicy(where=stage)
    elif stage in ("allowed", "mask", "accept"):
        more["guide"] = BrokenGuide(stage)
    elif stage == "watch":
        more["watch"] = watch
    elif stage == "forward":
        break_forward(engine, monkeypatch)
    elif stage == "logits":
        break_logits(engine, monkeypatch)
    state = engine.add_request(CULPRIT, prompt, params, **more)
    mine = [c.seq_id for c in state.completions]
    if stage == "detokenise":
        state.completions[1].stream = BrokenStream()  # pyright: ignore[reportAttributeAccessIssue]
    elif stage in ("come_to_rest", "decide_call"):
        break_calls(engine, stage.removesuffix("_call"), lambda s: s in mine, monkeypatch)
    elif stage == "fork":
        break_sharing(engine, mine[0], monkeypatch)


STAGES = (
    *("forward", "logits", "watch", "allowed", "mask", "accept", "detokenise", "come_to_rest", "due", "decide"),
    *("decide_call", "shapes", "fork"),
)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("late", [False, True], ids=["together", "later"])
@pytest.mark.parametrize("options", [{}, {"kv": "int8"}, {"grain": "head"}], ids=["plain", "int8", "head"])
def test_what_fails_for_one_request_ends_that_request(
    stage: str, late: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, engine = make_engine(max_seqs=8, **options), make_engine(max_seqs=8, **options)
    names = add_others(quiet, "grain" in options)
    expected = Watch(quiet)
    expected.finish()
    assert not any(TOKEN in c.token_ids for o in expected.outputs.values() for c in o.completions), "no mark"
    seen = Watch(engine)
    if not late:
        add_culprit(engine, stage, monkeypatch)
    add_others(engine, "grain" in options)
    for _ in range(3 if late else 0):
        seen.step()
    if late:
        add_culprit(engine, stage, monkeypatch)
    seen.finish()
    failed = seen.outputs.pop(CULPRIT)
    assert "error" in {c.finish_reason for c in failed.completions}, "nothing failed"
    errors = [e for s in seen.steps for r, e in s.failures if r == CULPRIT]
    assert len(errors) == 1 and sum(len(s.failures) for s in seen.steps) == 1
    assert [c.error for c in failed.completions if c.error] == [
        f"{type(errors[0]).__name__}: {errors[0]}" for c in failed.completions if c.error
    ]
    for name in names:
        assert [c.token_ids for c in seen.outputs[name].completions] == [
            c.token_ids for c in expected.outputs[name].completions
        ], name
    assert held_blocks(engine) == 0 and not engine.scheduler.has_work
    engine.cache.check()


def test_a_model_that_always_fails_ends_every_request_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_seqs=8)
    monkeypatch.setattr(engine.model, "logits", lambda hidden: (_ for _ in ()).throw(Broken("always")))
    seen = Watch(engine)
    names = add_others(engine, rewriting=False)
    seen.finish()
    reasons = {name: {c.finish_reason for c in seen.outputs[name].completions} for name in names}
    assert reasons == {name: {"error"} for name in names}
    assert held_blocks(engine) == 0
    monkeypatch.undo()
    engine.add_request("after", PROMPT, GREEDY)
    seen.finish()
    assert len(seen.outputs["after"].completions[0].token_ids) == GREEDY.max_tokens
