"""Attack scheduler, cache manager and prefix index together: add, step, cancel, fail, in any order, in a cache that is
far too small. Nothing starves or is ended for want of room, nothing shared is written, every ledger balances."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarn.core.errors import DoesNotFit, IncompatiblePlan
from kvarn.core.options import CachePlan, EngineOptions, GroupPlan, PoolPlan
from kvarn.core.specs import LayerSpec
from kvarn.engine.reasons import Expired
from kvarn.engine.scheduler import Scheduler
from kvarn.engine.sequence import Entry
from kvarn.engine.step_plan import SchedulerConfig, StepPlan
from kvarn.kernels import load_backend
from kvarn.kv.manager import CacheManager
from kvarn.kv.policies.base import Budget, Decision, KVPolicy, SequenceView
from kvarn.kv.policies.window import Window
from kvarn.kv.settling import SettleIn
from kvarn.kv.sizing import plan_cache
from kvarn.kv.step import Span

BLOCK = 4
FULL = LayerSpec(1, 2, 2, 1)
CONTEXT_TOKENS = 48


@dataclass(frozen=True)
class DropSome(KVPolicy):
    """Drops single tokens by their position alone; kept ones move together."""

    rewrites: ClassVar[bool] = True

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        return True

    def decide(self, view: SequenceView) -> Decision | None:
        keep = tuple(None if g is None else self._keep(g.positions, view.length - BLOCK) for g in view.groups)
        return Decision(keep, "some")

    def _keep(self, at: np.ndarray, old: int) -> np.ndarray:
        return (at >= 0) & ((at % 3 != 1) | (at > old))


POLICIES: dict[str, KVPolicy] = {
    "window": Window(budget=Budget(tokens=6)),
    "sinks": Window(budget=Budget(tokens=5), sinks=3),
    "settle": SettleIn(format="bfloat16", residual_tokens=0),
    "settle late": SettleIn(format="bfloat16", residual_tokens=5),
    "some": DropSome(),
}


def make_plan(
    layers: list[LayerSpec], max_seqs: int, step_tokens: int, residual: int, blocks: int, sealed: str | None
) -> CachePlan:
    """Pools of `blocks` blocks, or fewer where the plan has no use for so many; one in which requests may settle where
    the engine's own format seals nothing."""
    asked = EngineOptions(
        block_size=BLOCK,
        context_tokens=CONTEXT_TOKENS,
        max_seqs=max_seqs,
        step_tokens=step_tokens,
        residual_tokens=residual,
    )
    plan = plan_cache(layers, asked, max_context=None, default_format="float32", free_bytes=1 << 30)
    groups = []
    for group in plan.groups:
        (pool,) = group.pools
        pools = (PoolPlan("float32", min(blocks, pool.n_blocks), pool.block_bytes),)
        tier = sealed is None and group.group.spec.window_tokens is None
        if sealed is not None or tier:
            pools = (*pools, PoolPlan(sealed or "bfloat16", min(blocks, pool.n_blocks), pool.block_bytes // 2))
        groups.append(GroupPlan(group.group, pools, group.grain, int(tier)))
    return replace(plan, groups=tuple(groups))


class ServingMachine(RuleBasedStateMachine):
    @initialize(
        window=st.sampled_from([None, None, 1, 6, 9]),
        only_windows=st.booleans(),
        max_seqs=st.integers(1, 5),
        step_tokens=st.integers(2, 20),
        blocks=st.integers(6, 20),
        sealed=st.sampled_from([None, None, "float16", "int8"]),
        residual=st.sampled_from([0, 1, 5]),
        max_preemptions=st.integers(0, 3),
        growth_tokens=st.sampled_from([0, BLOCK]),
        hold_tokens=st.sampled_from([0, 1, 2 * BLOCK]),
        hold_s=st.sampled_from([0.0, 0.02, 1.0]),
    )
    def begin(
        self,
        window,
        only_windows,
        max_seqs,
        step_tokens,
        blocks,
        sealed,
        residual,
        max_preemptions,
        growth_tokens,
        hold_tokens,
        hold_s,
    ) -> None:
        other = FULL if window is None else replace(FULL, window_tokens=window)
        layers = [other] if only_windows else [FULL, other]
        plan = make_plan(layers, max_seqs, step_tokens, residual, blocks, sealed)
        self.manager = CacheManager(plan, layers, load_backend("reference"), poison=True, model_id="a model")
        config = SchedulerConfig(
            max_seqs=max_seqs,
            step_tokens=step_tokens,
            context_tokens=CONTEXT_TOKENS,
            max_preemptions=max_preemptions,
            growth_tokens=growth_tokens,
            hold_tokens=hold_tokens,
            hold_s=hold_s,
        )
        self.scheduler = Scheduler(config, self.manager)
        self.living: dict[int, Entry] = {}
        self.now_s, self.next_id = 0.0, 0

    @rule(
        head=st.integers(0, 2),
        shared=st.integers(0, 14),
        own=st.integers(1, 14),
        new=st.integers(1, 16),
        children=st.sampled_from([0, 0, 0, 1, 2]),
        priority=st.sampled_from([0, 0, 1]),
        tenant=st.sampled_from("ab"),
        deadline_s=st.sampled_from([None, None, None, 1.0]),
        reuse=st.sampled_from([True, True, False]),
        policy=st.sampled_from([None, None, *POLICIES]),
    )
    def add(self, head, shared, own, new, children, priority, tenant, deadline_s, reuse, policy) -> None:
        """Texts that begin alike: with one of three heads."""
        ids = range(self.next_id, self.next_id + 1 + children)
        finds, leaves = self.manager.prefix_roles(POLICIES[policy] if policy else None)
        entry = Entry(
            ids[0],
            (*[head] * shared, *range(own)),
            new,
            self.now_s,
            tuple(ids[1:]),
            priority=priority,
            tenant=tenant,
            namespace=tenant.encode(),
            deadline_s=None if deadline_s is None else self.now_s + deadline_s,
            reuse_prompt=reuse,
            finds_prefix=finds,
            leaves_prefix=leaves,
            stepwise=policy is not None,
            block_tokens=BLOCK,
        )
        try:
            for seq_id in ids:
                self.manager.assign(seq_id, POLICIES[policy] if policy else None, len(entry.prompt_ids))
            self.scheduler.add(entry)
        except (DoesNotFit, IncompatiblePlan):
            return
        self.next_id = ids.stop
        self.living |= dict.fromkeys(ids, entry)

    @rule(seconds=st.sampled_from([0.01, 0.01, 0.5]))
    def step(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.scheduler.schedule(self.now_s))

    @precondition(lambda self: getattr(self, "living", None))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.living)))
        assert self.scheduler.cancel(seq_id)
        del self.living[seq_id]

    @precondition(lambda self: getattr(self, "living", None))
    @rule(data=st.data())
    def a_step_fails(self, data: st.DataObject) -> None:
        """The model raises: what is to blame in the step ends, the others run again or are computed anew."""
        plan = self.scheduler.schedule(self.now_s)
        self.ended(plan)
        spans = [Span(r.seq_id, r.start, r.n_tokens) for r in plan.rows]
        if spans:
            self.manager.begin_step(spans)
            self.manager.abort_step(spans)
        for span in spans:
            what = data.draw(st.sampled_from(["end", "again", "anew"]))
            if what == "end":
                assert self.scheduler.cancel(span.seq_id)
                del self.living[span.seq_id]
            elif what == "anew":
                self.scheduler.restart(span.seq_id)

    def ended(self, plan: StepPlan) -> None:
        for ended in plan.ended:
            assert isinstance(ended, Expired), str(ended)
            del self.living[ended.seq_id]

    def take(self, plan: StepPlan) -> None:
        self.ended(plan)
        for held in plan.held:  # only on one that computes the same text for the same tenant now
            if held.seq_id in self.living and held.why.leader_id in self.living:
                mine, its = (self.scheduler.sequence(s) for s in (held.seq_id, held.why.leader_id))
                n = held.why.shared_tokens
                assert mine.tokens[:n] == its.tokens[:n] and n < len(mine.tokens) and n % BLOCK == 0
                assert mine.entry.namespace == its.entry.namespace
        if not plan.rows:
            return
        spans = [Span(r.seq_id, r.start, r.n_tokens) for r in plan.rows]
        texts = [self.scheduler.sequence(s.seq_id).tokens[s.start : s.start + s.n_tokens] for s in spans]
        self.manager.begin_step(spans)
        for span in spans:
            self.check_private(span)
        for seq_id in self.manager.commit_step(spans, texts):
            self.manager.come_to_rest(seq_id)
            if decision := self.manager.decide(seq_id):
                self.manager.apply(seq_id, decision)
        for row in plan.rows:
            token = (sum(self.scheduler.sequence(row.seq_id).tokens) % 3,)
            self.scheduler.advance(row.seq_id, row.n_tokens, token if row.samples else ())
            for child in row.children:
                self.scheduler.fork(child, token)
            for seq_id in (*row.children, row.seq_id):
                seq, entry = self.scheduler.sequence(seq_id), self.living[seq_id]
                if len(seq.tokens) == len(entry.prompt_ids) + entry.max_tokens:
                    self.scheduler.finish(seq_id)
                    del self.living[seq_id]

    def check_private(self, span: Span) -> None:
        """The blocks that a step writes belong to one sequence alone."""
        state = self.manager.sequences[span.seq_id]
        for group, row in zip(self.manager.groups, state.rows, strict=True):
            fill = int(group.tables.fill[row])
            for column in range(fill // BLOCK, (fill + span.n_tokens - 1) // BLOCK + 1):
                pool, block = int(group.tables.pool[row, column]), int(group.tables.block[row, column])
                assert group.pools[pool].refs[block] == 1, "a step writes into a shared block"

    @invariant()
    def balanced(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        assert self.manager.prefixes is not None
        self.manager.prefixes.index.check()
        assert len(self.manager.sequences) == self.scheduler.n_running
        assert self.scheduler.has_work == bool(self.living)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for _ in range(10_000):
            if not self.living:
                break
            self.now_s += 0.01
            plan = self.scheduler.schedule(self.now_s)
            assert plan.rows or plan.ended, "nobody came on"
            self.take(plan)
            self.balanced()
        assert not self.living, "no end in sight"
        assert self.manager.prefixes is not None
        self.manager.prefixes.reset()
        self.manager.check()
        assert self.manager.memory().blocks == 0


ServingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestServing = ServingMachine.TestCase
