"""A state machine attacks the cache manager; what it stores is compared with plain lists, slot by slot."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from kvarn.core.ledger import NoRoom
from kvarn.core.options import CachePlan, EngineOptions, GroupPlan, PoolPlan
from kvarn.core.specs import LayerSpec
from kvarn.kernels import load_backend
from kvarn.kernels.api import AttendParams
from kvarn.kv.manager import CacheManager
from kvarn.kv.sizing import blocks_for, plan_cache, sequence_blocks
from kvarn.kv.step import Span

HEADS, GROUP, K_DIM, V_DIM = 2, 2, 4, 3
TEXTS = st.lists(st.integers(1, 2), min_size=1, max_size=24)
FULL = LayerSpec(HEADS, K_DIM, V_DIM, HEADS * GROUP)


@dataclass
class Story:
    """What a sequence should hold. text: the tokens it will have; serials: for each of those committed, a number that
    stands for the text up to there, as keys and values do."""

    text: list[int]
    serials: list[int] = field(default_factory=list)

    def write(self, n_tokens: int) -> list[int]:
        """Serials of the next tokens."""
        chain = [self.serials[-1] if self.serials else 0]
        for token in self.text[len(self.serials) : len(self.serials) + n_tokens]:
            chain.append(zlib.crc32(bytes([token]), chain[-1]))
        return chain[1:]


def numbers(serials: list[int], layer: int, dim: int, side: int) -> Tensor:
    """[T, H, dim]: numbers that belong to a written token, exact in float16."""
    at = torch.tensor(serials, dtype=torch.int64).view(-1, 1, 1) * 7919
    head = torch.arange(HEADS).view(1, -1, 1) * 31
    channel = torch.arange(dim).view(1, 1, -1) * 17
    return ((at + head + channel + layer * 101 + side * 57) % 61 - 30).float() / 8


def make_plan(layers: list[LayerSpec], options: EngineOptions, blocks: int, sealed: str | None) -> CachePlan:
    plan = plan_cache(layers, options, max_context=None, default_format="float32", free_bytes=1 << 30)
    if options.cache == "contiguous":
        return plan
    groups = []
    for g in plan.groups:
        (pool,) = g.pools
        n = min(blocks * g.rows_per_sequence, pool.n_blocks)
        pools = (PoolPlan("float32", n, pool.block_bytes),)
        if sealed is not None:
            pools = (*pools, PoolPlan(sealed, n, pool.block_bytes // 2))
        groups.append(GroupPlan(g.group, pools, g.grain))
    return replace(plan, groups=tuple(groups))


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        block=st.sampled_from([1, 2, 4]),
        window=st.sampled_from([None, 1, 4, 6, 7]),
        mode=st.sampled_from(["paged", "paged", "paged", "contiguous"]),
        grain=st.sampled_from(["group", "layer", "head"]),
        blocks=st.sampled_from([5, 9, 16]),
        sealed=st.sampled_from([None, None, "float16"]),
        residual=st.sampled_from([0, 1, 5]),
        step_tokens=st.sampled_from([3, 8]),
        model_id=st.sampled_from([None, "a model", "a model"]),
    )
    def build(self, block, window, mode, grain, blocks, sealed, residual, step_tokens, model_id) -> None:
        self.layers = [
            FULL,
            FULL if window is None else replace(FULL, window_tokens=window),
            FULL,
            LayerSpec(query_heads=HEADS * GROUP, shares_layer=0),
        ]
        options = EngineOptions(
            cache=mode,
            block_size=block,
            context_tokens=24,
            max_seqs=4,
            step_tokens=step_tokens,
            residual_tokens=residual,
            grain=grain if mode == "paged" else "group",
        )
        self.plan = make_plan(self.layers, options, blocks, sealed if mode == "paged" else None)
        self.manager = CacheManager(self.plan, self.layers, load_backend("reference"), poison=True, model_id=model_id)
        self.stories: dict[int, Story] = {}
        self.ids = itertools.count()
        self.generator = torch.Generator().manual_seed(0)

    def free(self) -> list[int]:
        return [p.free_blocks for g in self.manager.groups for p in g.pools]

    def available(self) -> list[int]:
        """Free blocks, and those that only the prefix index holds."""
        sharing = self.manager.prefixes
        spare = [sharing.spare_blocks(i, p) if sharing else 0 for i, p in self.places()]
        return [f + s for f, s in zip(self.free(), spare, strict=True)]

    def places(self) -> list[tuple[int, int]]:
        return [(i, p) for i, g in enumerate(self.manager.groups) for p in range(len(g.pools))]

    def whole(self) -> list[int]:
        return [p.n_blocks for g in self.manager.groups for p in g.pools]

    # -- what the engine does -------------------------------------------------------------------------------------
    @rule(text=TEXTS, headroom=st.sampled_from([0, 0, 3]), reuse=st.booleans(), namespace=st.sampled_from([b"", b"x"]))
    def admit(self, text: list[int], headroom: int, reuse: bool, namespace: bytes) -> None:
        before = self.free()
        if self.manager.never_fits(len(text)) is not None:
            return
        seq_id, prompt = next(self.ids), text[: max(1, len(text) // 2)]
        got = self.manager.admit(seq_id, prompt, namespace, headroom_tokens=headroom, reuse=reuse)
        if isinstance(got, NoRoom):
            assert self.stories or headroom, "a sequence that fits was refused by an empty cache"
            assert self.free() == before and seq_id not in self.manager.sequences
            return
        assert 0 <= got < len(prompt) and (not got or (reuse and self.manager.prefixes))
        self.stories[seq_id] = Story(text)
        self.stories[seq_id].serials += self.stories[seq_id].write(got)

    @precondition(lambda self: getattr(self, "stories", None))
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.stories)), min_size=1, unique=True))
        spans, left = [], self.plan.step_tokens
        for seq_id in chosen:
            story = self.stories[seq_id]
            most = min(left, len(story.text) - len(story.serials))
            if most < 1:
                continue
            n = data.draw(st.integers(1, most))
            if self.extend(seq_id, len(story.serials) + n):
                spans.append(Span(seq_id, len(story.serials), n))
                left -= n
        if spans:
            kept = [data.draw(st.sampled_from([s.n_tokens, s.n_tokens, s.n_tokens // 2, 0])) for s in spans]
            self.run(spans, kept, abort=data.draw(st.sampled_from([False] * 5 + [True])))

    def extend(self, seq_id: int, to_tokens: int) -> bool:
        before = self.free()
        room = self.manager.extend(seq_id, to_tokens)
        if room is None:
            return True
        assert room.short_by_blocks > 0 and str(room)
        assert self.free() == before, "a refusal changed something"
        return False

    def run(self, spans: list[Span], kept: list[int], *, abort: bool) -> None:
        """Write every layer, compare what it attended with the textbook, then commit, roll back, or abort."""
        written = [self.stories[s.seq_id].write(s.n_tokens) for s in spans]
        step = self.manager.begin_step(spans)
        all_serials = list(itertools.chain.from_iterable(written))
        for index, spec in enumerate(self.layers):
            owner = index if spec.shares_layer is None else spec.shares_layer
            k, v = (numbers(all_serials, owner, d, side) for side, d in enumerate((K_DIM, V_DIM)))
            q = torch.randn(len(all_serials), HEADS * GROUP, K_DIM, generator=self.generator)
            params = AttendParams(scale=0.5, window_tokens=self.layers[owner].window_tokens)
            own = owner == index
            out = step.layer(index).append_and_attend(q, k if own else None, v if own else None, None, params)
            torch.testing.assert_close(out, self.textbook(spans, written, q, owner, params), atol=1e-5, rtol=1e-5)
        self.manager.settle(step)
        if abort:
            self.manager.abort_step(spans)
            return
        for span, serials, n in zip(spans, written, kept, strict=True):
            story = self.stories[span.seq_id]
            self.manager.commit(span.seq_id, story.text[span.start : span.start + n], span.n_tokens)
            story.serials += serials[:n]

    def textbook(self, spans, written, q: Tensor, layer: int, params: AttendParams) -> Tensor:
        outs, at = [], 0
        for span, serials in zip(spans, written, strict=True):
            every = [*self.stories[span.seq_id].serials, *serials]
            k, v = (numbers(every, layer, d, side) for side, d in enumerate((K_DIM, V_DIM)))
            k, v = (x.repeat_interleave(GROUP, dim=1) for x in (k, v))
            mine = q[at : at + span.n_tokens]
            at += span.n_tokens
            query, key = torch.arange(span.start, len(every))[:, None], torch.arange(len(every))[None]
            seen = key <= query
            if params.window_tokens is not None:
                seen &= key > query - params.window_tokens
            scores = torch.einsum("qhd,khd->hqk", mine, k) * params.scale
            weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outs)

    @precondition(lambda self: getattr(self, "stories", None))
    @rule(data=st.data())
    def reserve_ahead(self, data: st.DataObject) -> None:
        """Slots are taken, and the step never comes (its sequence was stalled)."""
        seq_id = data.draw(st.sampled_from(sorted(self.stories)))
        story = self.stories[seq_id]
        most = min(len(story.text), len(story.serials) + self.plan.step_tokens)
        if most > len(story.serials):
            self.extend(seq_id, data.draw(st.integers(len(story.serials) + 1, most)))

    @precondition(lambda self: getattr(self, "stories", None))
    @rule(data=st.data(), other=TEXTS)
    def fork(self, data: st.DataObject, other: list[int]) -> None:
        parent = data.draw(st.sampled_from(sorted(self.stories)))
        before, child = self.free(), next(self.ids)
        story = self.stories[parent]
        if isinstance(self.manager.fork(parent, child), NoRoom):
            assert self.free() == before and child not in self.manager.sequences
            return
        if self.plan.mode == "paged":
            assert self.free() == before, "sharing took a block"
        known = len(story.serials)
        self.stories[child] = Story([*story.text[:known], *other[: len(story.text) - known]], list(story.serials))

    @precondition(lambda self: getattr(self, "stories", None))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.stories)))
        self.manager.release(seq_id)
        del self.stories[seq_id]

    @rule(text=TEXTS, chunk=st.integers(1, 8))
    def alone_it_always_gets_through(self, text: list[int], chunk: int) -> None:
        reach = len(text)
        for seq_id in sorted(self.stories):
            self.manager.release(seq_id)
        self.stories.clear()
        assert self.available() == self.whole()
        if self.manager.never_fits(reach) is not None:
            return
        assert self.manager.never_fits(reach - 1) is None, "what fits does not fit with fewer tokens"
        seq_id = next(self.ids)
        got = self.manager.admit(seq_id, text, b"")
        assert isinstance(got, int)
        story = self.stories[seq_id] = Story(text)
        story.serials += story.write(got)
        while (done := len(self.stories[seq_id].serials)) < reach:
            n = min(chunk, self.plan.step_tokens, reach - done)
            assert self.extend(seq_id, done + n), "no room although it has the cache to itself"
            self.run([Span(seq_id, done, n)], [n], abort=False)

    # -- what must hold -------------------------------------------------------------------------------------------
    def contents(self, seq_id: int) -> list[dict[int, list[float]]]:
        """For each table row of each group, in order: position -> the numbers of that slot."""
        found = []
        for group, first in zip(self.manager.groups, self.manager.sequences[seq_id].rows, strict=True):
            for row in range(first, first + group.rows_per_seq):
                held: dict[int, list[float]] = {}
                for pool, block in zip(*group.tables.entries(row), strict=True):
                    at = group.pools[pool].positions[block]
                    k, v = group.backend.decode(group.views[pool], torch.tensor([block]))
                    for slot in np.flatnonzero(at >= 0):
                        position = int(at[slot])
                        assert position not in held, f"position {position} stands twice in row {row}"
                        held[position] = [*self.own(group, k[0, ..., slot]), *self.own(group, v[0, ..., slot, :])]
                found.append(held)
        return found

    def own(self, group, stored: Tensor) -> list[float]:
        """stored [L, H, D]: axes that the grain does not have repeat one number."""
        layers = 1 if group.grain != "group" else None
        heads = 1 if group.grain == "head" else None
        return stored[:layers, :heads].flatten().tolist()

    def expected(self, group, offset: int, serial: int) -> list[float]:
        layers, heads = list(group.layers), list(range(HEADS))
        if group.grain != "group":
            layers = [layers[offset // (HEADS if group.grain == "head" else 1)]]
        if group.grain == "head":
            heads = [offset % HEADS]
        k, v = (torch.cat([numbers([serial], i, d, s)[0, heads] for i in layers]) for s, d in ((0, K_DIM), (1, V_DIM)))
        return [*k.flatten().tolist(), *v.flatten().tolist()]

    @invariant()
    def ledgers_balance(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()
            memory = self.manager.memory()
            assert memory.tokens == sum(len(s.serials) for s in self.stories.values())
            assert memory.sequences == len(self.stories)
            assert memory.stored_slots <= memory.reserved_slots

    @invariant()
    def slots_hold_what_was_written(self) -> None:
        for seq_id, story in getattr(self, "stories", {}).items():
            rows = iter(self.contents(seq_id))
            length, size = len(story.serials), self.plan.block_size
            for group in self.manager.groups:
                window = group.spec.window_tokens if self.plan.mode == "paged" else None
                oldest = 0 if window is None else max(0, length - window + 1)
                for offset in range(group.rows_per_seq):
                    held = next(rows)
                    assert set(held) <= set(range(length)) and set(held) >= set(range(oldest, length))
                    for position, found in held.items():
                        assert found == self.expected(group, offset, story.serials[position])
                    if window is not None:
                        assert len(held) <= window + size
                        most = sequence_blocks(group.spec, self.plan.context_tokens, size)
                        assert blocks_for(len(held), size) <= most <= blocks_for(window, size) + 1

    def teardown(self) -> None:
        for seq_id in getattr(self, "stories", {}):
            self.manager.release(seq_id)
        if hasattr(self, "manager"):
            self.manager.check()
            assert self.available() == self.whole()


ManagerMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=16, deadline=None)
TestManager = ManagerMachine.TestCase
