"""Sliding windows with sinks, with positions of the text and within the cache, against a cache of plain lists."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvarn.core.errors import IncompatiblePlan, UnknownName
from kvarn.core.requests import SamplingParams
from kvarn.kernels.api import AttendParams, Rope
from kvarn.kernels.reference import BACKEND
from kvarn.kv.choice import parse_choice, policy_of
from kvarn.kv.governing import check_rotation
from kvarn.kv.manager import CacheManager
from kvarn.kv.view import StepInputs
from kvarn.models.base import CausalLM
from support.engines import BLOCK, Watch, make_engine
from support.models import tiny_model

KERNELS = BACKEND()
PROMPT = [(11 * i * i + 5 * i) % 250 for i in range(30)]
WINDOW, SINKS = 16, 6


@dataclass
class Streaming:
    """StreamingLLM over plain lists: keys are kept unrotated and rotated anew in each step, by their places among what
    is kept (in_cache) or by their places in the text."""

    model: CausalLM
    in_cache: bool
    k: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)

    def layer(self, index: int) -> StreamingLayer:
        return StreamingLayer(self, index)

    def plain(self) -> None:
        return None

    def drop(self, length: int) -> None:
        """Whole blocks, as a paged cache drops them."""
        first = (length - WINDOW) // BLOCK * BLOCK
        self.kept = [i for i in range(length) if i < -(-SINKS // BLOCK) * BLOCK or i >= first]


@dataclass
class StreamingLayer:
    owner: Streaming
    index: int

    def append_and_attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, rope: Rope | None, params: AttendParams
    ) -> Tensor:
        assert k is not None and v is not None
        mine, new = self.owner, len(q)
        mine.k[self.index] = torch.cat((mine.k.get(self.index, k[:0]), k))
        mine.v[self.index] = torch.cat((mine.v.get(self.index, v[:0]), v))
        at = torch.arange(len(mine.kept)) if mine.in_cache else torch.tensor(mine.kept)
        (embedding,) = mine.model._ropes.values()
        keys = KERNELS.rope(mine.k[self.index][mine.kept], embedding(at))
        values = mine.v[self.index][mine.kept]
        queries = KERNELS.rope(q, embedding(at[-new:]))
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * params.scale
        order = torch.arange(len(mine.kept))
        seen = order[None, :] <= order[-new:, None]
        return torch.einsum(
            "hqk,khd->qhd", torch.softmax(scores.masked_fill(~seen, -torch.inf), -1), values
        ).contiguous()


def streamed(n_tokens: int, in_cache: bool) -> list[int]:
    model = tiny_model("llama")
    kv = Streaming(model, in_cache)
    text, fed = list(PROMPT), list(PROMPT)
    while len(text) < len(PROMPT) + n_tokens:
        kv.kept = [*kv.kept, *range(len(text) - len(fed), len(text))]
        step = StepInputs(torch.tensor(fed), torch.arange(len(text) - len(fed), len(text)), KERNELS)
        with torch.inference_mode():
            fed = [int(model.logits(model.forward(step, kv))[-1].argmax())]
        if (len(text) == len(PROMPT) or len(text) % BLOCK == 0) and len(kv.kept) >= WINDOW + BLOCK:
            kv.drop(len(text))
        text += fed
    return text[len(PROMPT) :]


@pytest.mark.parametrize("grain", ["group", "head"])
@pytest.mark.parametrize("positions", ["original", "cache"])
def test_as_streaming_over_lists(positions: str, grain: str) -> None:
    """Far enough that the sinks are turned many times, and memory stays what it is."""
    engine = make_engine(kv=f"window:{WINDOW},sinks={SINKS},positions={positions}", grain=grain)
    watch = Watch(engine)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=90, ignore_eos=True))
    most = 0
    while engine.has_work:
        watch.step()
        assert isinstance(engine.cache, CacheManager)
        rows = engine.cache.groups[0].rows_per_seq
        if watch.deltas and (states := list(engine.cache.sequences.values())) and states[0].length > len(PROMPT):
            most = max(most, engine.cache.groups[0].pools[0].held_blocks // rows)
    assert list(watch.outputs["a"].completions[0].token_ids) == streamed(90, positions == "cache")
    assert most <= 2 + WINDOW // BLOCK + 2


def test_positions_matter() -> None:
    assert streamed(90, True) != streamed(90, False)


def test_sealed_sinks_are_turned_from_what_was_written() -> None:
    """int8 sinks: turned again and again, they stay as near to the exact ones as one encoding allows."""
    engine = make_engine(kv=f"window:{WINDOW},sinks=4,positions=cache+int8", residual_tokens=4)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=90, ignore_eos=True))
    cache = engine.cache
    assert isinstance(cache, CacheManager)
    first: Tensor | None = None
    while engine.has_work:
        engine.step()
        cache.check()
        for state in cache.sequences.values():
            if 0 in state.written:
                first = state.written[0].k if first is None else first
                assert state.written[0].k is first
                (group,), row = cache.groups, state.rows[0]
                pool, block = int(group.tables.pool[row, 0]), int(group.tables.block[row, 0])
                now = group.backend.decode(group.views[pool], torch.tensor([block]))[0][0]
                assert torch.allclose(now.norm(dim=-2), first[0, 0].norm(dim=-2), rtol=0.03)
    assert first is not None


def test_rotation_by_length_is_refused() -> None:
    policy = policy_of(parse_choice("window:16,sinks=4,positions=cache"))
    assert policy is not None
    with pytest.raises(IncompatiblePlan, match="rotation depends on how long"):
        check_rotation(policy, [None])
    with pytest.raises(UnknownName, match="'somewhere'; known: original, cache"):
        parse_choice("window:16,positions=somewhere")
