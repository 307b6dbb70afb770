"""Single requests that choose their cache: what each gets, and what it is told that it got."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvarn import SamplingParams
from kvarn.kv.choice import parse_choice
from kvarn.kv.policies.base import KVPolicy
from kvarn.server.errors import ApiError
from kvarn.server.kv_choice import KVGot, chosen_cache, got
from kvarn.server.schema.common import KVChoice
from support.engines import Watch, make_engine
from support.models import byte_tokenizer
from support.serving import Running, client, running_server, tiny_parts

ALSO = ("int8", "h2o:25%")
PROMPT = "a mill turns the river into flour, and the flour into bread"
ASKED = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(also=ALSO) as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with client(server) as made:
        yield made
    assert server.idle()


def ask(http: httpx.Client, kv: object, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={**ASKED, "kvarn": True, "kv": kv, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def alone(choice: str) -> tuple[int, ...]:
    """The tokens of the engine that is asked directly."""
    watch = Watch(make_engine("llama", also=ALSO))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    watch.engine.add_request("0", byte_tokenizer().encode(PROMPT), params, cache=parse_choice(choice))
    watch.finish()
    return watch.outputs["0"].completions[0].token_ids


@pytest.mark.parametrize("asked", ["int8", {"format": "int8"}, {"format": "int8", "policy": "full"}], ids=str)
def test_a_further_format_is_used_and_said(http: httpx.Client, asked: object) -> None:
    full, less = ask(http, None)["kvarn"]["kv"], ask(http, asked)
    kv = less["kvarn"]["kv"]
    assert (full["format"], full["policy"], list(full["bytes_by_format"])) == ("float32", "full", ["float32"])
    assert (kv["format"], kv["policy"]) == ("int8", "full")
    assert kv["bytes_by_format"]["int8"] > 0 and sum(kv["bytes_by_format"].values()) == kv["bytes"]
    assert kv["bytes"] < 0.6 * full["bytes"] and kv["logical_bytes"] == full["logical_bytes"]
    assert kv["ratio"] == round(kv["logical_bytes"] / kv["bytes"], 4) > 1.5
    assert tuple(less["choices"][0]["token_ids"]) == alone("int8")


def test_requests_of_one_batch_get_what_each_chose(http: httpx.Client) -> None:
    choices = ["full", "int8", "h2o:25%", "full", "int8"]
    with ThreadPoolExecutor(len(choices)) as pool:
        answers = list(pool.map(lambda kv: ask(http, kv), choices))
    assert [a["kvarn"]["kv"]["format"] for a in answers] == ["float32", "int8", "float32", "float32", "int8"]
    assert [a["kvarn"]["kv"]["policy"] for a in answers] == ["full", "full", "h2o:25%", "full", "full"]
    assert [tuple(a["choices"][0]["token_ids"]) for a in answers] == [alone(c) for c in choices]


def test_cached_tokens_are_those_of_the_request(http: httpx.Client) -> None:
    """A prompt is computed in the server's own format, so formats find each other's."""
    nothing = ask(http, "int8", cache_salt="own")
    first, second, third = (ask(http, kv, cache_salt="own") for kv in ("full", "full", "int8"))
    assert [a["kvarn"]["cached_tokens"] > 0 for a in (nothing, first, second, third)] == [False, True, True, True]
    assert second["kvarn"]["cached_tokens"] == second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (
        list(first["kvarn"]["kv"]["bytes_by_format"]) == list(second["kvarn"]["kv"]["bytes_by_format"]) == ["float32"]
    )


def test_a_stream_ends_with_what_it_got(http: httpx.Client) -> None:
    body = {**ASKED, "kv": "int8", "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        chunks = [json.loads(x[6:]) for x in answer.iter_lines() if x.startswith("data: {")]
    assert chunks[-1]["kvarn"]["kv"] == ask(http, "int8")["kvarn"]["kv"]


def test_answers_and_prompts_add_up(http: httpx.Client) -> None:
    one, many = (ask(http, "int8", prompt=p) for p in (PROMPT, [PROMPT, PROMPT]))
    assert many["kvarn"]["kv"]["bytes_by_format"] == {
        f: 2 * n for f, n in one["kvarn"]["kv"]["bytes_by_format"].items()
    }


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ("int4", "kv.format", "this server's cache has 'float32', 'int8'"),
        ({"format": "fp8_e4m3"}, "kv.format", "this server's cache has 'float32', 'int8'"),
        ("float32,residual=7", "kv.residual_tokens", "this server's cache has 0"),
        ("h2o:25%+int8", None, "int8 goes with the policy full"),
    ],
    ids=str,
)
def test_others_are_refused_with_what_there_is(
    http: httpx.Client, server: Running, asked: object, param: str | None, said: str
) -> None:
    answer = http.post("/v1/completions", json={**ASKED, "kv": asked})
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"] and error["fixes"]
    assert param is None or (error["param"], error["code"]) == (param, "kv_unavailable")
    assert server.idle()


def test_the_stats_say_which_formats_there_are(http: httpx.Client) -> None:
    kv = http.get("/v1/kvarn/stats").json()["kv"]
    assert (kv["format"], kv["policy"], kv["formats"]) == ("float32", "full", ["float32", "int8"])


def test_residual_of_a_further_format_is_its_own(http: httpx.Client) -> None:
    kept, same, none = (
        ask(http, kv)["kvarn"]["kv"]
        for kv in ("int8,residual=24", {"format": "int8", "residual_tokens": 24}, {"format": "int8,residual=0"})
    )
    assert kept == same
    assert kept["bytes_by_format"]["float32"] > none["bytes_by_format"]["float32"]
    assert kept["ratio"] < none["ratio"]


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        ("h2o:25%", None, KVGot("float32", "h2o:25%")),
        ("h2o:25%", KVChoice(format="float32", policy=None, residual_tokens=None), KVGot("float32", "h2o:25%")),
        ("h2o:25%", KVChoice(format="int8", policy=None, residual_tokens=None), KVGot("int8", "full")),
        ("h2o:25%", "window:32", KVGot("float32", "window:32")),
        (None, "int8", KVGot("int8", "full")),
    ],
    ids=str,
)
def test_what_a_choice_means(own: str | None, asked: KVChoice | str | None, expected: KVGot) -> None:
    """Said and done: the engine's policy for the request keeps everything exactly where `full` is said."""
    parts = tiny_parts(kv=own, also=("int8",))
    chosen, engine = chosen_cache(asked, parts.plan), parts.engine
    assert got(chosen, parts.plan, engine.policy) == expected
    engine.add_request("0", [1] * 40, SamplingParams(max_tokens=40, ignore_eos=True), cache=chosen)
    policy = engine.cache._assigned[0][0]  # pyright: ignore[reportAttributeAccessIssue]
    assert (policy is None or isinstance(policy, KVPolicy)) and (expected.policy == "full") == (
        policy is None or policy.tiers == ("int8",)
    )
    watch = Watch(engine)
    watch.finish()
    trace = watch.outputs["0"].completions[0].trace
    assert trace is not None and expected.format in dict(trace.bytes_by_format)


def test_no_further_formats_without_also() -> None:
    with pytest.raises(ApiError, match="this server's cache has 'float32'"):
        chosen_cache("int8", tiny_parts().plan)
