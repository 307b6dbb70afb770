"""What every cache policy promises, alone and under a real engine over a tiny model with poisoned pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvarn.core.cache_params import CacheParams
from kvarn.core.events import BlocksDropped, BlocksSealed, BlocksTaken, Event, SequenceReleased
from kvarn.core.options import EngineOptions
from kvarn.core.requests import SamplingParams
from kvarn.engine.build import assemble
from kvarn.engine.engine import Engine
from kvarn.kernels import load_backend
from kvarn.kv.choice import policy_name, policy_text
from kvarn.kv.manager import CacheManager
from kvarn.kv.policies.base import Budget, KVPolicy, ScoredPolicy, load_policy, policy_names
from kvarn.kv.reading import group_view
from support.engines import BLOCK, SMALL, Watch, make_engine
from support.models import byte_tokenizer, tiny_model
from support.policy_views import random_view

NAMES = policy_names()
DECIDING = [n for n in NAMES if load_policy(n).decides]
PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(45)]
ANSWER = SamplingParams(max_tokens=30, ignore_eos=True)
BUDGET = 16


def example(name: str, budget: Budget | None = None, **given: Any) -> KVPolicy:
    """The policy with a small budget, and protected tokens where it has some."""
    tokens = 2 * BUDGET if name == "tiered" else BUDGET  # what it keeps in full precision takes some blocks
    small: dict[str, Any] = {"budget": budget or Budget(tokens=tokens), "sinks": 2, "recent": 4, "query_tokens": 4}
    small |= {"light": "fp8_e4m3"}  # the tests' blocks are too small for packed formats
    cls = load_policy(name)
    known = {f.name for f in fields(cls)}
    return cls(**{k: v for k, v in {**small, **given}.items() if k in known})


FORMATS = [(n, kv) for n in DECIDING for kv in (None, "int8") if kv is None or not example(n).tiers]


def engine_for(*policies: KVPolicy, **options: Any) -> Engine:
    return make_engine(also=tuple(policy_text(p) for p in policies), **options)


def answers(engine: Engine, policies: list[KVPolicy], prompts: list[list[int]] | None = None) -> list[tuple[int, ...]]:
    """What each policy's request answers, all in one batch."""
    watch = Watch(engine)
    for index, policy in enumerate(policies):
        ids = prompts[index] if prompts else PROMPT
        engine.add_request(str(index), ids, ANSWER, cache=CacheParams(policy=policy_text(policy)))
    watch.finish()
    return [watch.outputs[str(i)].completions[0].token_ids for i in range(len(policies))]


@pytest.mark.parametrize("name", DECIDING)
@pytest.mark.parametrize("seed", range(3))
def test_protected_tokens_survive(name: str, seed: int) -> None:
    policy = example(name)
    view, _ = random_view(seed, policy.query_tokens)
    decision = policy.decide(view)
    assert decision is not None and decision.keep[0] is not None and view.groups[0] is not None
    newest = policy.newest if isinstance(policy, ScoredPolicy) else BUDGET if name == "window" else 4
    for row, keep in zip(view.groups[0].positions, decision.keep[0], strict=True):
        kept = set(row[keep].tolist())
        assert {0, 1} <= kept and set(range(view.length - newest, view.length)) <= kept


@pytest.mark.parametrize("name", DECIDING)
def test_decisions_are_pure(name: str) -> None:
    policy = example(name)
    view, numbers = random_view(5, policy.query_tokens)
    before = numbers.kept.copy()
    first, second = policy.decide(view), policy.decide(view)
    assert first is not None and second is not None
    assert all(
        np.array_equal(a, b) for a, b in zip(first.keep, second.keep, strict=True) if a is not None and b is not None
    )
    assert first.note == second.note and np.array_equal(before, numbers.kept)


@cache
def bytes_by_length(kv: str | None) -> dict[int, int]:
    """Physical bytes that the whole text takes, by its length."""
    engine, found = make_engine(kv=kv, residual_tokens=4, grain="head", prefix_caching=False), {}
    engine.add_request("a", PROMPT, ANSWER)
    while engine.has_work:
        engine.step()
        assert isinstance(engine.cache, CacheManager)
        found |= {s.length: engine.cache.memory().physical_bytes for s in engine.cache.sequences.values()}
    return found


@pytest.mark.parametrize(("name", "kv"), FORMATS)
def test_the_budget_holds_and_memory_falls(name: str, kv: str | None) -> None:
    """After each step no row holds more than the budget and a block (a layer's or head's own budget where they differ),
    and the bytes of the held blocks, counted on the tensors, are the ledger's."""
    policy = example(name)
    engine = make_engine(kv=kv, policy=policy_text(policy), residual_tokens=4)
    manager = engine.cache
    assert isinstance(manager, CacheManager)
    engine.add_request("a", PROMPT, ANSWER)
    watch, full, tiers = Watch(engine), bytes_by_length(kv), [1]
    while engine.has_work:
        watch.step()
        held = manager.memory().physical_bytes
        on_tensors = sum(
            store.nbytes * pool.held_blocks // pool.n_blocks
            for g in manager.groups
            for store, pool in zip(g.stores, g.pools, strict=True)
        )
        assert held == on_tensors
        for state in manager.sequences.values():
            if state.length < len(PROMPT):
                continue
            if manager.wants_rereading(state.seq_id):
                assert state.length == len(PROMPT), "nothing goes on before its policy has decided"
                continue
            (group,) = manager.groups
            tokens = (group_view(group, state.rows[0], state.length, None).positions >= 0).sum(1)
            sinks = BLOCK if name == "window" else 0
            if policy.tiers:  # more tokens in fewer bits: the budget is their bytes
                assert held <= 2 * BUDGET * manager.plan.bytes_per_token
                tiers = [p.held_blocks for p in group.pools]
                continue
            uneven = name in ("pyramidkv", "adakv", "kvzip")  # rows have budgets of their own; together they keep to it
            most = tokens.mean() if uneven else tokens.max()
            assert most <= BUDGET + BLOCK + sinks, f"{tokens} tokens in the rows"
            # tokens / BLOCK blocks, and a partly filled one of each pool
            assert sum(p.held_blocks for p in group.pools) <= (tokens // BLOCK + len(group.pools)).sum()
            assert held < full[state.length] * (0.6 if state.length > 60 else 1)
    assert watch.outputs["a"].completions[0].token_ids and all(tiers)


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_above_the_text_changes_nothing(name: str) -> None:
    policy = example(name, Budget(tokens=100))
    (expected,) = answers(make_engine(), [load_policy("full")()])
    assert answers(engine_for(policy), [policy]) == [expected]
    assert answers(engine_for(example(name, Budget(share=1.0))), [example(name, Budget(share=1.0))]) == [expected]


def test_a_batch_of_mixed_policies_is_each_alone() -> None:
    policies = [example(n) for n in NAMES]
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(len(policies))]
    together = answers(engine_for(*policies), policies, prompts)
    alone = [answers(engine_for(*policies), [p], [ids])[0] for p, ids in zip(policies, prompts, strict=True)]
    assert together == alone
    assert len(set(together)) > 1


@pytest.mark.parametrize("name", [n for n in DECIDING if load_policy(n).rewrites])
def test_several_answers_of_one_prompt_do_not_disturb_each_other(name: str) -> None:
    """n answers share blocks until a policy rewrites them: greedy ones must all be the same."""
    policy = example(name)
    engine = engine_for(policy)
    watch = Watch(engine)
    engine.add_request("n", PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, n=3), policy=policy)
    watch.finish()
    engine.add_request("1", PROMPT, SamplingParams(max_tokens=20, ignore_eos=True), policy=policy)
    watch.finish()
    (alone,) = watch.outputs["1"].completions
    assert {c.token_ids for c in watch.outputs["n"].completions} == {alone.token_ids}


@pytest.mark.parametrize(("name", "kv"), FORMATS)
def test_replaying_the_events_gives_the_same_tables(name: str, kv: str | None) -> None:
    """Blocks taken, sealed, dropped and released, as the events tell it, are those in the tables."""
    held: dict[int, Counter[tuple[int, int, int]]] = {}

    def replay(event: Event) -> None:
        mine = held.setdefault(event.seq_id, Counter())
        if isinstance(event, BlocksTaken):
            mine.update((event.group, event.pool, b) for b in event.blocks)
        elif isinstance(event, BlocksSealed):
            mine.subtract((event.group, 0, b) for b in event.source)
            mine.update((event.group, event.pool, b) for b in event.target)
        elif isinstance(event, BlocksDropped):
            mine.subtract((event.group, p, b) for p, b in zip(event.pools, event.blocks, strict=True))
        elif isinstance(event, SequenceReleased):
            held.pop(event.seq_id)

    options = EngineOptions(**{**vars(SMALL), "kv": kv, "residual_tokens": 4, "policy": policy_text(example(name))})
    engine = assemble(tiny_model("llama"), byte_tokenizer(), load_backend(), options, replay).engine
    cache = engine.cache
    assert isinstance(cache, CacheManager)
    for index in range(2):
        engine.add_request(str(index), PROMPT[index:], ANSWER)
    while engine.has_work:
        engine.step()
        for seq_id, state in cache.sequences.items():
            tables: Counter[tuple[int, int, int]] = Counter()
            for index, (group, row) in enumerate(zip(cache.groups, state.rows, strict=True)):
                for pool, counts in enumerate(group.named([row])):
                    tables.update({(index, pool, b): n for b, n in counts.items()})
            assert +held[seq_id] == tables
    assert not held


def test_names() -> None:
    assert {policy_name(example(n)) for n in NAMES} == set(NAMES)


def test_a_policy_that_rewrites_needs_a_format_that_can_be() -> None:
    with pytest.raises(Exception, match="H2O drops single tokens; a int4 block cannot be rewritten"):
        make_engine(kv="h2o:16+int4", block_size=8)
