"""Cache choices: text -> typed -> the same text; mistakes name the known ones."""

from __future__ import annotations

import pytest

from kvarn.core.cache_params import CacheParams
from kvarn.core.errors import IncompatiblePlan, KvarnError, UnknownName
from kvarn.core.options import EngineOptions
from kvarn.kv.choice import check_context, parse_budget, parse_choice, parse_choices, policy_of, settled
from kvarn.kv.policies.base import Budget, policy_names
from kvarn.kv.policies.snapkv import SnapKV
from kvarn.kv.policies.window import Window


@pytest.mark.parametrize(
    ("text", "params", "canonical"),
    [
        ("full", CacheParams(None, "full"), "full"),
        ("int8", CacheParams("int8", "full"), "int8"),
        (" k=int8 , v=int4 ", CacheParams("k=int8,v=int4", "full"), "k=int8,v=int4"),
        ("int4,residual=64", CacheParams("int4", "full", 64), "int4,residual=64"),
        ("window:1024,sinks=4", CacheParams(None, "window:1024,sinks=4"), "window:1024,sinks=4"),
        ("window:sinks=4,budget=1024", CacheParams(None, "window:1024,sinks=4"), "window:1024,sinks=4"),
        ("h2o:25%", CacheParams(None, "h2o:25%"), "h2o:25%"),
        ("h2o", CacheParams(None, "h2o:50%"), "h2o:50%"),
        ("int8+h2o:25%", CacheParams("int8", "h2o:25%"), "h2o:25%+int8"),
        ("snapkv:64MiB,window=16", CacheParams(None, "snapkv:64MiB,query_tokens=16"), "snapkv:64MiB,query_tokens=16"),
        ("tova:1.5kb", CacheParams(None, "tova:1500B"), "tova:1500B"),
    ],
)
def test_choices(text: str, params: CacheParams, canonical: str) -> None:
    assert parse_choice(text) == params
    assert params.text == canonical and parse_choice(canonical) == params


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_is_written_as_it_is_read(name: str) -> None:
    policy = policy_of(CacheParams(policy=name))
    again = policy_of(parse_choice(parse_choice(name).text))
    assert again == policy and again is not None


def test_values_arrive() -> None:
    assert policy_of(parse_choice("window:100,sinks=4")) == Window(Budget(tokens=100), 4)
    assert policy_of(parse_choice("snapkv:25%,pool=5,window=8")) == SnapKV(Budget(share=0.25), query_tokens=8, pool=5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int9", "KV format 'int9'"),
        ("h2p:25%", "KV policy 'h2p'"),
        ("h2o:wat=3", "parameter of h2o 'wat'; known: budget, sinks, recent"),
        ("full:3", "full takes no parameters"),
        ("h2o:0", "a budget of 0"),
        ("h2o:-5", "a budget of -5"),
        ("h2o:0%", "a budget of 0 of the text"),
        ("h2o:101%", "a budget of 1.01 of the text"),
        ("h2o:2.5", "a budget of 2.5 tokens"),
        ("h2o:12parsecs", "'12parsecs' is no budget"),
        ("h2o:25%,25%", "budget is given twice"),
        ("h2o:8,recent_share=2", "recent_share is 2.0"),
        ("window:64,sinks=-1", "sinks is -1"),
        ("window:64,sinks=x", "use a whole number"),
        ("snapkv:8", "less than 0 sinks and 32 newest"),
        ("h2o:25%+tova:25%", "names two policies"),
        ("int8+int4", "names two formats"),
        ("k=int8", "is no KV format"),
        ("int8+", "is no cache choice"),
        ("", "is no cache choice"),
    ],
)
def test_mistakes(text: str, said: str) -> None:
    with pytest.raises(KvarnError) as caught:
        parse_choice(text)
    assert isinstance(caught.value, (IncompatiblePlan, UnknownName)) and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lists() -> None:
    assert [c.text for c in parse_choices("full; int8;h2o:25% ; int8;")] == ["full", "int8", "h2o:25%"]
    with pytest.raises(IncompatiblePlan, match="names no cache"):
        parse_choices(" ; ")


@pytest.mark.parametrize(("text", "budget"), [("7", Budget(tokens=7)), ("1KiB", Budget(nbytes=1024))])
def test_budgets(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["h2o:", "h2o: ", "h2o:25%,", "h2o:,sinks=4", "window:+int8"])
def test_an_empty_argument_is_refused(text: str) -> None:
    with pytest.raises(IncompatiblePlan, match=r"says nothing .* \(try: (h2o|window):25%"):
        parse_choice(text)


def test_a_budget_above_the_context_is_refused() -> None:
    check_context(parse_choice("h2o:128"), 128)
    with pytest.raises(IncompatiblePlan, match="129 tokens is above the context of 128"):
        check_context(parse_choice("h2o:129"), 128)


def test_the_grain_follows_what_may_be_asked_for() -> None:
    assert settled(EngineOptions(kv="int8")).grain == "group"
    assert settled(EngineOptions(kv="window:64")).grain == "group"
    assert settled(EngineOptions(kv="h2o:25%+int8")) == EngineOptions(kv="int8", policy="h2o:25%", grain="head")
    assert settled(EngineOptions(also=("tova:64", "int8"))).grain == "head"
    with pytest.raises(IncompatiblePlan, match="two policies"):
        settled(EngineOptions(kv="h2o:25%", policy="tova:64"))
