"""A state machine attacks a whole engine in a small pool: requests come, are cancelled, the model breaks. Whatever
happens to the others, each request that ends by itself has the tokens that it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvarn.core.errors import DoesNotFit
from kvarn.core.options import CACHE_MODES
from kvarn.core.requests import SamplingParams
from support.engines import Watch, held_blocks, layer_by_layer, make_engine, serve

TEXT = b"round and round the millstone goes, and what it was the baker knows"
PARAMS = (
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=9, ignore_eos=True),
    SamplingParams(max_tokens=14, temperature=1.0, seed=3, n=3),
    SamplingParams(max_tokens=40, temperature=0.8, seed=1, top_k=30, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=20, logprobs=1, prompt_logprobs=1, presence_penalty=1.0),
    SamplingParams(max_tokens=30, temperature=1.5, seed=9, n=2, stop=("e", "\x07", "00")),
)


@cache
def alone(model: str, kv: str | None, begin: int, length: int, which: int) -> tuple[Any, ...]:
    """(tokens, text, reason) of each completion, from an engine with all the room there is."""
    output = serve(make_engine(model, kv=kv), [(prompt(begin, length), PARAMS[which])]).outputs["0"]
    return tuple((c.token_ids, c.text, c.finish_reason) for c in output.completions)


def prompt(begin: int, length: int) -> list[int]:
    return list(TEXT[begin : begin + length])


FORWARD = ("forward", "forward_layers")


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        model=st.sampled_from(["llama", "gemma3"]),
        mode=st.sampled_from(["paged"] * 4 + [m for m in CACHE_MODES if m != "paged"]),
        blocks=st.sampled_from([17, 24, 60]),
        step_tokens=st.sampled_from([5, 16, 64]),
        max_seqs=st.sampled_from([2, 5]),
        caching=st.booleans(),
        kv=st.sampled_from([None, "int8"]),
        by_layers=st.booleans(),
    )
    def build(
        self,
        model: str,
        mode: str,
        blocks: int,
        step_tokens: int,
        max_seqs: int,
        caching: bool,
        kv: str | None,
        by_layers: bool,
    ) -> None:
        room = {"paged": blocks, "contiguous": 64, "none": None}[mode]
        kv = kv if mode == "paged" else None
        self.model, self.kv = model, kv
        self.engine = make_engine(
            model, blocks=room, cache=mode, step_tokens=step_tokens, max_seqs=max_seqs, prefix_caching=caching, kv=kv
        )
        if by_layers and mode != "none":
            layer_by_layer(self.engine, tokens=5)
        self.watch = Watch(self.engine)
        self.asked: dict[str, tuple[int, int, int]] = {}
        self.ended: set[str] = set()

    def living(self) -> list[str]:
        return [r for r in self.asked if r not in self.ended and r not in self.watch.outputs]

    @rule(begin=st.sampled_from([0, 0, 3, 17]), length=st.integers(1, 40), which=st.integers(0, len(PARAMS) - 1))
    def ask(self, begin: int, length: int, which: int) -> None:
        name, held = str(len(self.asked)), held_blocks(self.engine)
        if self.engine.cache.never_fits(length + PARAMS[which].max_tokens - 1) is not None:
            with pytest.raises(DoesNotFit):
                self.engine.add_request(name, prompt(begin, length), PARAMS[which])
        else:
            self.engine.add_request(name, prompt(begin, length), PARAMS[which])
            self.asked[name] = (begin, length, which)
        assert held_blocks(self.engine) == held

    @precondition(lambda self: getattr(self, "engine", None) and self.engine.has_work)
    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.watch.step()

    @precondition(lambda self: getattr(self, "asked", None) and self.living())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.living()))
        output = self.engine.cancel(name)
        assert output is not None
        self.compare(name, output, part=True)
        self.ended.add(name)
        self.engine.cache.check()

    @precondition(lambda self: getattr(self, "engine", None) and self.engine.has_work)
    @rule(interrupt=st.booleans())
    def break_a_step(self, interrupt: bool) -> None:
        """An error of every forward pass ends the requests of the step; an interrupt ends none."""
        error = KeyboardInterrupt() if interrupt else ValueError("boom")
        model, before = self.engine.model, set(self.living())
        for name in FORWARD:
            model.__dict__[name] = broken(getattr(type(model), name).__get__(model), error)
        try:
            self.watch.step()
        except KeyboardInterrupt:
            self.engine.cache.check()
        finally:
            for name in FORWARD:
                del model.__dict__[name]
        outputs = self.watch.outputs
        failed = {r for r in before if r in outputs and any(c.error for c in outputs[r].completions)}
        assert not (interrupt and failed)
        self.ended |= failed

    def compare(self, name: str, output: Any, *, part: bool = False) -> None:
        for completion, (tokens, text, reason) in zip(
            output.completions, alone(self.model, self.kv, *self.asked[name]), strict=True
        ):
            if part:
                assert tokens[: len(completion.token_ids)] == completion.token_ids
                assert text.startswith(completion.text) or completion.finish_reason == "cancelled"
            else:
                assert (completion.token_ids, completion.text, completion.finish_reason) == (tokens, text, reason)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.watch.finish()
        for name, output in self.watch.outputs.items():
            self.compare(name, output, part=name in self.ended)
        assert set(self.watch.outputs) | self.ended == set(self.asked)
        assert held_blocks(self.engine) == 0 and not self.engine.scheduler.has_work


def broken(forward: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        forward(*args)
        raise error

    return run


EngineMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=14, deadline=None)
TestEngine = EngineMachine.TestCase
