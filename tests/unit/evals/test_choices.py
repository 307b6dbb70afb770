from __future__ import annotations

import pytest

from kvarn.core.errors import IncompatiblePlan, UnknownName
from kvarn.core.options import EngineOptions
from kvarn.evals.choices import FULL, parse_eval_choice, parse_eval_choices
from kvarn.evals.gate import is_lossy


def test_the_full_cache_comes_first_named_or_not() -> None:
    assert [c.text for c in parse_eval_choices("int8; k=int8,v=int4; h2o:25%")] == [
        "full",
        "int8",
        "k=int8,v=int4",
        "h2o:25%",
    ]
    assert parse_eval_choices("full; int8; int8")[0] == FULL
    assert len(parse_eval_choices("full; int8; int8")) == 2


def test_shared_layers_go_with_any_choice() -> None:
    choice = parse_eval_choice("int8 + share=2")
    assert (choice.text, choice.share_layers) == ("share=2+int8", 2)
    assert parse_eval_choice(choice.text) == choice
    assert choice.options(EngineOptions(weights="float32")).share_layers == 2
    assert parse_eval_choice("share=3").text == "share=3"
    assert not parse_eval_choice("share=3").is_full


@pytest.mark.parametrize("text", ["share=0", "share=two", "share=2+share=3", "", " ; ", "int8+int4"])
def test_what_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(IncompatiblePlan):
        parse_eval_choices(text)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="int8"):
        parse_eval_choices("int9")


def test_what_counts_as_lossy() -> None:
    assert not is_lossy(None, None)
    assert not is_lossy("bfloat16", "full")
    assert is_lossy("int8", "full") and is_lossy("k=bfloat16,v=int4", None)
    assert is_lossy(None, "window:64") and is_lossy(None, "full", share_layers=2)
