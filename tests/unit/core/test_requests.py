"""What a request may ask: everything else is refused by value, with a way out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvarn.core.errors import InvalidRequest
from kvarn.core.requests import SamplingParams

NAN, INF = math.nan, math.inf
BAD = [
    *(("max_tokens", v) for v in (0, -1, 1.5, None, "9", True, NAN)),
    *(("temperature", v) for v in (-0.1, NAN, INF, 101, "hot", None, True)),
    *(("top_p", v) for v in (0, -0.1, 1.01, NAN, "1", None)),
    *(("min_p", v) for v in (-0.1, 1.01, NAN, None)),
    *(("top_k", v) for v in (-1, 1.5, None, "3", False)),
    *(("n", v) for v in (0, -1, 129, 1.0, None, True)),
    *(("seed", v) for v in (1.5, "1", 2**64, -(2**63) - 1, True)),
    *(("repetition_penalty", v) for v in (0, -1, NAN, 101)),
    *(("presence_penalty", v) for v in (NAN, INF, 101, None)),
    *(("frequency_penalty", v) for v in (NAN, -101, "x")),
    *(("stop", v) for v in (5, None, [1], ["fine", ""], "", {"a": 1}, [None], ["x"] * 65, b"x")),
    *(("stop_token_ids", v) for v in ((-1,), (1.5,), ("a",), 7, None)),
    *(("logprobs", v) for v in (-1, 101, 1.5, True)),
    *(("prompt_logprobs", v) for v in (-1, 101, "2")),
    *(("logit_bias", v) for v in ({-1: 1.0}, {1: NAN}, {"1": 1.0}, {1: "x"}, [1], None, {1: 1e300}, {True: 1.0})),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda x: repr(x)[:30])
def test_refused_by_name_with_a_way_out(name: str, value: object) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(InvalidRequest, match=name if value != ["x"] * 65 else "65 stop strings") as caught:
        SamplingParams(**given)
    assert caught.value.fixes and "\n" not in str(caught.value)


GOOD = [
    {"max_tokens": 1},
    {"temperature": 0},
    {"temperature": 1e-300},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"stop": ["a", "b"]},
    {"stop": ()},
    {"stop_token_ids": [1, 2]},
    {"logit_bias": {0: -100}},
    {"n": 128},
    {"logprobs": 0},
    {"top_k": 10**9},
]


@pytest.mark.parametrize("given", GOOD, ids=str)
def test_accepted(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    for name in ("stop", "stop_token_ids"):
        assert isinstance(getattr(params, name), tuple)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
