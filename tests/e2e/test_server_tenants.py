"""What one tenant asked, another cannot find, neither by cached tokens nor by time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.serving import MODEL, Running, client, running_server

KEYS = """
[tenants.acme]
keys = ["sk-a", "sk-a2"]
[tenants.other]
keys = ["sk-b"]
[tenants.left]
keys = ["sk-l"]
share_prefixes = true
[tenants.right]
keys = ["sk-r"]
share_prefixes = true
"""
PROMPT = "the same long prompt, word for word, that two tenants send; " * 7
BIG = {"context_tokens": 512, "step_tokens": 64, "kv_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS, "utf-8")
    with running_server({"api_keys": path}, **BIG) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with client(server) as made:
        yield made


def ask(http: httpx.Client, key: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "kvarn": True, **more}
    response = http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    return response.raise_for_status().json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_own_prompt_is_found_again_by_any_key_of_the_tenant(http: httpx.Client) -> None:
    first, again = ask(http, "sk-a", f"1 {PROMPT}"), ask(http, "sk-a2", f"1 {PROMPT}")
    assert cached(first) == 0
    assert cached(again) >= len(PROMPT) - 4
    assert again["choices"] == first["choices"]
    assert again["kvarn"]["prefix"][0] is not None


def test_another_tenants_prompt_is_not_found(http: httpx.Client) -> None:
    ask(http, "sk-a", f"2 {PROMPT}")
    theirs = ask(http, "sk-b", f"2 {PROMPT}")
    assert cached(theirs) == 0
    assert "acme" not in str(theirs["kvarn"]) and "nothing cached" in theirs["kvarn"]["prefix"][0]


def test_tenants_that_agreed_to_it_share(http: httpx.Client) -> None:
    ask(http, "sk-l", f"3 {PROMPT}")
    assert cached(ask(http, "sk-r", f"3 {PROMPT}")) > 0
    assert cached(ask(http, "sk-a", f"3 {PROMPT}")) == 0


def test_a_salt_of_the_request_keeps_users_apart(http: httpx.Client) -> None:
    ask(http, "sk-a", f"4 {PROMPT}", cache_salt="user 1")
    assert cached(ask(http, "sk-a", f"4 {PROMPT}", cache_salt="user 2")) == 0
    assert cached(ask(http, "sk-a", f"4 {PROMPT}")) == 0
    assert cached(ask(http, "sk-b", f"4 {PROMPT}", cache_salt="user 1")) == 0
    assert cached(ask(http, "sk-a", f"4 {PROMPT}", cache_salt="user 1")) > 0


def first_token_s(answer: dict[str, Any]) -> float:
    return answer["kvarn"]["timings"][0]["prefill_s"]


def test_time_tells_nothing_of_another_tenant(http: httpx.Client) -> None:
    """Twelve prompts that the other tenant just sent and twelve that nobody did, in turns: the medians differ by less
    than a third of what a real hit saves."""
    known, fresh, own = [], [], []
    for index in range(12):
        ask(http, "sk-a", f"k{index} {PROMPT}")
        known.append(first_token_s(ask(http, "sk-b", f"k{index} {PROMPT}")))
        fresh.append(first_token_s(ask(http, "sk-b", f"f{index} {PROMPT}")))
        own.append(first_token_s(ask(http, "sk-b", f"f{index} {PROMPT}")))
    saved = statistics.median(fresh) - statistics.median(own)
    assert saved > 0, "a tenant's own repeated prompt must be faster"
    assert statistics.median(fresh) - statistics.median(known) < saved / 3


def test_multi_turn_chat_reuses_the_history(http: httpx.Client) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": PROMPT[:100]}]
    headers = {"authorization": "Bearer sk-a"}
    lengths = []
    for turn in range(3):
        body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = http.post("/v1/chat/completions", json=body, headers=headers).raise_for_status().json()
        if turn:
            assert cached(answer) >= lengths[-1] - 4, "all but the last block of the history"
        lengths.append(answer["usage"]["prompt_tokens"])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]
        messages[-2] = {"role": "assistant", "content": messages[-2]["content"]}
