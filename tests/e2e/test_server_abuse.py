"""Clients that send nonsense, too much, too slowly, or leave: a clear 4xx, and everything is given back."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.serving import MODEL, Running, client, running_server

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
JSON = {"content-type": "application/json"}
LONG = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = {"max_body_bytes": 200_000, "header_timeout_s": 0.5, "body_timeout_s": 0.5, "send_timeout_s": 1.0}
    with running_server(limits) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with client(server) as made:
        yield made


@pytest.fixture(autouse=True)
def everything_is_given_back(server: Running, http: httpx.Client) -> Iterator[None]:
    yield
    assert server.idle()
    assert server.held()[0] == 0
    assert http.get("/health").json()["status"] == "ok"


def clear_refusal(response: httpx.Response, statuses: tuple[int, ...] = (400,)) -> dict[str, Any]:
    assert response.status_code in statuses, response.text[:300]
    error = response.json()["error"]
    assert error["message"] and error["type"]
    return error


@given(body=st.binary(max_size=300), path=st.sampled_from(PATHS))
@settings(max_examples=80, suppress_health_check=list(HealthCheck))
def test_random_bytes(http: httpx.Client, body: bytes, path: str) -> None:
    clear_refusal(http.post(path, content=body, headers=JSON))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
FIELDS = [
    "prompt", "messages", "max_tokens", "temperature", "top_p", "n", "stop", "logit_bias", "stream", "logprobs", "seed",
    "response_format", "structured_outputs", "kv", "kvarn", "model", "tokens", "priority", "timeout_s", "echo",
]  # fmt: skip


@given(body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4), path=st.sampled_from(PATHS))
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_wrong_types(http: httpx.Client, body: dict[str, Any], path: str) -> None:
    """Any JSON in any field: answered or refused, never a 5xx."""
    text = json.dumps({"max_tokens": 2, **body})
    response = http.post(path, content=text, headers=JSON)
    assert response.status_code < 500, (text, response.text)
    if response.status_code != 200:
        clear_refusal(response, (400, 404))


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"prompt":["'])
@pytest.mark.parametrize("path", PATHS)
def test_deeply_nested(server: Running, opening: str, path: str) -> None:
    with client(server) as http:
        clear_refusal(http.post(path, content=opening * 10_000, headers=JSON))


def test_deep_schema_is_refused(server: Running) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with client(server) as http:
        body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": schema}}
        assert http.post(PATHS[0], json=body).status_code in (200, 400)


@pytest.mark.parametrize(
    "pattern", ["(a{1,1000}){1,1000}", "(" * 500, "[" * 500, "(?=x)", "a" * 30_000, "(a|b|c){500}d"]
)
def test_hard_patterns(server: Running, pattern: str) -> None:
    body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": pattern}}
    with client(server) as http:
        response = http.post(PATHS[0], json=body)
        assert response.status_code in (200, 400), response.text


def test_lone_surrogates(server: Running) -> None:
    with client(server) as http:
        for body in (
            '{"prompt": "\\ud800"}',
            '{"messages": [{"role": "user", "content": "\\udfff"}]}',
            '{"model": "\\ud800", "prompt": "x"}',
            '{"\\ud800": 1, "prompt": "x"}',
            '{"prompt": "x", "stop": ["\\ud800"], "max_tokens": 2}',
            '{"prompt": "x", "cache_salt": "\\ud800", "max_tokens": 2}',
            '{"prompt": "x", "structured_outputs": {"choice": ["\\ud800"]}, "max_tokens": 2}',
        ):
            for path in PATHS[:2]:
                response = http.post(path, content=body, headers=JSON)
                assert response.status_code in (200, 400, 404), (body, response.text)


def test_ten_thousand_stop_strings(server: Running) -> None:
    with client(server) as http:
        error = clear_refusal(http.post(PATHS[0], json={"prompt": "x", "stop": [f"s{i}" for i in range(10_000)]}))
        assert "10000 stop strings" in error["message"] and error["fixes"] == ["use at most 64"]


def test_huge_numbers(server: Running) -> None:
    with client(server) as http:
        for number in ("9" * 5_000, "1e999", "-1e999", "NaN", "1e-400", "9223372036854775808"):
            for name in ("temperature", "max_tokens", "seed", "n", "top_k", "timeout_s"):
                body = f'{{"prompt": "x", "max_tokens": 1, "{name}": {number}}}'
                response = http.post(PATHS[0], content=body, headers=JSON)
                assert response.status_code in (200, 400), (name, number, response.text)


def test_body_too_large(server: Running) -> None:
    with client(server) as http:
        clear_refusal(http.post(PATHS[0], json={"prompt": "x" * 300_000}), (413,))

        def pieces() -> Iterator[bytes]:  # no Content-Length: counted as it comes
            for _ in range(300):
                yield b" " * 1_000

        clear_refusal(http.post(PATHS[0], content=pieces(), headers=JSON), (413,))


def test_long_wrong_lists_have_a_short_error(server: Running) -> None:
    with client(server) as http:
        response = http.post(PATHS[0], json={"prompt": [0.5] * 40_000})
        clear_refusal(response)
        assert len(response.content) < 2_000


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_bodies_that_do_not_say_they_are_json(http: httpx.Client, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    error = clear_refusal(http.post(PATHS[0], content=b'{"prompt": "x"}', headers=headers))
    assert error["code"] == "content_type"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
def test_wrong_methods_and_paths(server: Running, method: str) -> None:
    with client(server) as http:
        clear_refusal(http.request(method, PATHS[0], headers=JSON), (405,))
        clear_refusal(http.request(method, "/v1/none", headers=JSON), (404,))


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=10)
    made.settimeout(10)
    return made


def test_slow_headers_are_cut_off(server: Running) -> None:
    with connect(server) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        begun = time.monotonic()
        assert line.recv(100) == b""
        assert time.monotonic() - begun < 5


def test_slow_second_request_is_cut_off(server: Running) -> None:
    with connect(server) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in line.recv(4_096)
        line.sendall(b"GET /health HT")
        while got := line.recv(4_096):
            assert got
        assert got == b""


def test_slow_body_gets_408(server: Running) -> None:
    with connect(server) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\n%b\r\n{" % head(b" " * 100))
        assert line.recv(4_096).startswith(b"HTTP/1.1 408")


def test_a_client_that_does_not_read_holds_nothing(server: Running) -> None:
    with connect(server) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        body = json.dumps({**LONG, "stream": True, "logprobs": 100, "n": 20}).encode()
        line.sendall(b"POST /v1/completions HTTP/1.1\r\n%b\r\n" % head(body) + body)
        assert server.idle(20)


def head(body: bytes) -> bytes:
    return b"Host: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(body)


def leave(server: Running, body: dict[str, Any], after_s: float) -> None:
    with connect(server) as line:
        raw = json.dumps(body).encode()
        line.sendall(b"POST /v1/completions HTTP/1.1\r\n%b\r\n" % head(raw) + raw)
        time.sleep(after_s)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_at_any_moment(server: Running, stream: bool, n: int) -> None:
    for after_ms in (0, 1, 2, 5, 10, 20, 50):
        leave(server, {**LONG, "stream": stream, "n": n, "prompt": ["abc", "x" * 60]}, after_ms / 1000)
    assert server.idle()


def test_leaving_is_logged_as_499(server: Running) -> None:
    leave(server, {**LONG, "n": 30}, 0.02)
    assert server.idle()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if b'status="499"' in server.context.metrics.text():
            return
        time.sleep(0.02)
    pytest.fail("no request with status 499 was counted")


def test_memory_is_flat(server: Running) -> None:
    """Abuse in a loop: after a first round, resident memory grows by less than 8 MB."""

    def round_() -> None:
        with client(server) as http:
            for _ in range(10):
                http.post(PATHS[0], content="[" * 100_000, headers=JSON)
                http.post(PATHS[0], json={"prompt": "x" * 20_000})
                http.post(PATHS[0], json={"prompt": "x", "stop": [str(i) for i in range(5_000)]})
                http.post(PATHS[0], json={"prompt": [0.5] * 20_000})

    round_()
    round_()
    before = psutil.Process().memory_info().rss
    for _ in range(3):
        round_()
    assert psutil.Process().memory_info().rss - before < 8e6


def test_too_many_requests() -> None:
    with running_server({"max_requests": 4}, max_seqs=2) as small:
        gate = threading.Barrier(12)

        def ask() -> httpx.Response:
            gate.wait()
            with client(small) as http:
                return http.post("/v1/completions", json={**LONG, "model": MODEL})

        with ThreadPoolExecutor(12) as pool:
            responses = [f.result() for f in [pool.submit(ask) for _ in range(12)]]
        refused = [r for r in responses if r.status_code == 429]
        assert {r.status_code for r in responses} == {200, 429}
        for response in refused:
            clear_refusal(response, (429,))
            assert int(response.headers["retry-after"]) >= 1
        assert small.idle()


def test_too_many_connections_get_a_readable_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarn.server.run.EXTRA_CONNECTIONS", 2)
    with running_server({"max_requests": 2}, max_seqs=2) as small, client(small) as http:
        host, port = small.url.removeprefix("http://").split(":")
        assert http.get("/health").status_code == 200
        idle = [socket.create_connection((host, int(port))) for _ in range(4)]
        time.sleep(0.1)
        response = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        error = clear_refusal(response, (503,))
        assert error["code"] == "too_many_connections" and "5 connections are open" in error["message"]
        assert int(response.headers["retry-after"]) >= 1
        for connection in idle:
            connection.close()
        time.sleep(0.1)
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_tools_are_refused_in_words(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    error = clear_refusal(http.post("/v1/chat/completions", json=body))
    assert (error["message"], error["param"], error["code"]) == (
        "tools: not supported here; send null",
        "tools",
        "unsupported",
    )
    assert http.post("/v1/chat/completions", json={**body, "tools": [], "max_tokens": 1}).status_code == 200


def test_queue_limit_counts_answers() -> None:
    with running_server({"max_queue": 2}, max_seqs=2) as small, client(small) as http:
        assert http.post("/v1/completions", json={"prompt": "x", "n": 4, "max_tokens": 2}).status_code == 200
        clear_refusal(http.post("/v1/completions", json={"prompt": "x", "n": 5, "max_tokens": 2}))
