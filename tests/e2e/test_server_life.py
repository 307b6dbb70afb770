"""Health, metrics, events, tenants, failures, the end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.serving import MODEL, Running, client, running_server

KEYS = """
[tenants.acme]
keys = ["sk-a"]
[tenants.other]
keys = ["sk-b"]
[tenants.boss]
keys = ["sk-boss"]
admin = true
"""
LONG = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"stall_s": 0.2}) as running:
        yield running


def samples(http: httpx.Client) -> dict[str, float]:
    """Metric -> value, summed over labels."""
    response = http.get("/metrics")
    assert response.status_code == 200
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_metrics_count_what_happened(server: Running) -> None:
    with client(server) as http:
        before = samples(http)
        for _ in range(3):
            http.post("/v1/completions", json={**LONG, "max_tokens": 7}).raise_for_status()
        after = samples(http)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["kvarn:generation_tokens_total"] == 21
    assert grown["kvarn:prompt_tokens_total"] == 3
    assert grown["kvarn:request_success_total"] == 3
    assert grown["kvarn:time_to_first_token_seconds_count"] == 3
    assert grown["kvarn:inter_token_latency_seconds_count"] == 18
    assert after["kvarn:num_requests_running"] == after["kvarn:num_requests_waiting"] == 0
    assert after["kvarn:kv_cache_usage_perc"] == 0, "blocks that are only kept for later prompts are not in use"
    assert after["kvarn:kv_cache_held_bytes"] == after["kvarn:kv_cache_spare_bytes"] > 0
    assert after["kvarn:kv_cache_pool_bytes"] > 0


def test_metrics_prefix() -> None:
    with running_server({"metrics_prefix": "vllm"}) as other, client(other) as http:
        assert "vllm:num_requests_running" in samples(http)


def listen(
    server: Running, until: str, headers: dict[str, str] | None = None, replay: int = 0, number: int = 0
) -> list[dict[str, Any]]:
    """Events up to the first of kind `until` that is not older than event `number`."""
    events: list[dict[str, Any]] = []
    url = f"{server.url}/v1/kvarn/events?replay={replay}"
    with httpx.Client(timeout=20) as http, http.stream("GET", url, headers=headers) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if events[-1]["kind"] == until and events[-1]["number"] >= number:
                    break
    return events


def test_events_tell_the_story_of_a_request(server: Running) -> None:
    found: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: found.extend(listen(server, "request_finished")))
    reader.start()
    time.sleep(0.3)
    with client(server) as http:
        http.post("/v1/completions", json={**LONG, "max_tokens": 20}).raise_for_status()
    reader.join(20)
    kinds = [e["kind"] for e in found]
    for kind in (
        "request_queued",
        "request_admitted",
        "sequence_admitted",
        "blocks_taken",
        "step",
        "sequence_released",
    ):
        assert kind in kinds, kinds
    queued = next(e for e in found if e["kind"] == "request_queued")
    finished = found[-1]
    assert finished["request_id"] == queued["request_id"]
    assert finished["completions"][0]["tokens"] == 20
    numbers = [e["number"] for e in found]
    assert numbers == sorted(numbers)
    assert listen(server, "request_finished", replay=1000, number=finished["number"])[-1] == finished


def test_no_event_holds_a_text(server: Running) -> None:
    secret = "qwertzuiop"
    with client(server) as http:
        http.post("/v1/completions", json={"prompt": secret, "max_tokens": 2}).raise_for_status()
    assert secret not in json.dumps(listen(server, "request_finished", replay=1000))


def test_health_sees_a_stall(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine hangs in a step: unhealthy, until it goes on."""
    hang, go_on = threading.Event(), threading.Event()
    plain = server.engine.step

    def slow_step():
        hang.set()
        go_on.wait(20)
        return plain()

    with client(server) as http:
        assert http.get("/health").status_code == 200
        monkeypatch.setattr(server.engine, "step", slow_step)
        asking = threading.Thread(target=lambda: http.post("/v1/completions", json={**LONG, "max_tokens": 2}))
        asking.start()
        assert hang.wait(10)
        time.sleep(0.4)
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "stalled")
        assert httpx.get(f"{server.url}/metrics", timeout=10).status_code == 200
        assert httpx.get(f"{server.url}/v1/kvarn/stats", timeout=10).status_code == 503
        go_on.set()
        asking.join(20)
        monkeypatch.undo()
        assert http.get("/health").status_code == 200
    assert server.idle()


def test_idle_is_healthy(server: Running) -> None:
    time.sleep(0.5)
    with client(server) as http:
        assert http.get("/health").json() == {"status": "ok", "stalled_s": 0.0, "open_requests": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_forward_ends_its_request_not_the_server(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with client(server) as http:
        with monkeypatch.context() as patch:

            def broken(*args: Any) -> Any:
                raise RuntimeError("secret detail")

            patch.setattr(server.engine.model, "forward", broken)
            response = http.post("/v1/completions", json={**LONG, "stream": stream})
        assert "secret" not in response.text
        error = json.loads(response.text.removeprefix("data: ").partition("\n")[0])["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
        assert stream or response.status_code == 500
        assert "[DONE]" not in response.text
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
    assert server.idle()


def test_an_unexpected_error_of_a_route_tells_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **more: Any) -> Any:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server.context.tokenizer, "encode", broken)
    with client(server) as http:
        response = http.post("/v1/completions", json=LONG)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


def test_timeout_of_a_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = server.engine.step

    def slow_step():
        time.sleep(0.02)
        return plain()

    monkeypatch.setattr(server.engine, "step", slow_step)
    with client(server) as http:
        response = http.post("/v1/completions", json={**LONG, "timeout_s": 0.1})
        assert response.status_code == 408
        assert response.json()["error"]["code"] == "timeout"
        streamed = http.post("/v1/completions", json={**LONG, "timeout_s": 0.1, "stream": True})
        assert '"code":"timeout"' in streamed.text and "[DONE]" not in streamed.text
    assert server.idle()


def test_request_id_is_echoed(server: Running) -> None:
    with client(server) as http:
        assert http.get("/health", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"
        assert len(http.get("/health").headers["x-request-id"]) == 32


# ---- tenants --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS, "utf-8")
    with running_server({"api_keys": path}) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_are_needed(guarded: Running) -> None:
    with client(guarded) as http:
        for headers in ({}, bearer("sk-x"), {"authorization": "sk-a"}):
            for path in ("/v1/completions", "/tokenize", "/v1/none"):
                response = http.post(path, json=LONG, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["type"] == "authentication_error"
            assert http.get("/v1/models", headers=headers).status_code == 401
        assert http.get("/v1/models", headers=bearer("sk-a")).status_code == 200
        assert http.get("/health").status_code == http.get("/metrics").status_code == 200
        schema = http.get("/openapi.json").json()
    assert schema["paths"]["/v1/completions"]["post"]["security"] == [{"bearer": []}]
    assert "security" not in schema["paths"]["/health"]["get"]


def test_stats_are_for_admins(guarded: Running) -> None:
    with client(guarded) as http:
        assert http.get("/v1/kvarn/stats", headers=bearer("sk-a")).status_code == 403
        assert http.get("/v1/kvarn/stats", headers=bearer("sk-boss")).json()["kv"]["pool_bytes"] > 0


def ask(http: httpx.Client, key: str, prompt: str, **more: Any) -> int:
    """Cached tokens of a request."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, **more}
    usage = http.post("/v1/completions", json=body, headers=bearer(key)).raise_for_status().json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_tenants_see_only_their_own_events(guarded: Running) -> None:
    with client(guarded) as http:
        ask(http, "sk-a", "mine")
        ask(http, "sk-b", "theirs")
        assert guarded.idle()
    owned = listen(guarded, "request_finished", bearer("sk-b"), replay=1000)
    everything = []
    with client(guarded) as http, http.stream("GET", "/v1/kvarn/events?replay=1000", headers=bearer("sk-boss")) as all_:
        for line in all_.iter_lines():
            if line.startswith("data: "):
                everything.append(json.loads(line.removeprefix("data: ")))
                if [e["kind"] for e in everything].count("request_finished") == 2:
                    break
    assert {e["request_id"] for e in owned if "request_id" in e} < {
        e["request_id"] for e in everything if "request_id" in e
    }
    assert not [e for e in owned if e["kind"] == "step"]
    assert [e for e in everything if e["kind"] == "step"]


# ---- the end --------------------------------------------------------------------------------------------------------


def test_open_requests_end_before_the_server_does() -> None:
    """Told to stop, it answers what is open and takes nothing new; event streams end."""
    with running_server() as running:
        events: list[dict[str, Any]] = []
        ended = threading.Event()

        def read() -> None:
            events.extend(listen(running, "never"))
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        answers: list[httpx.Response] = []
        with client(running) as http:
            asking = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=LONG)))
            asking.start()
            while not running.context.desk.open_requests:
                time.sleep(0.002)
            running.server.should_exit = True
            asking.join(20)
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 100
        assert ended.wait(10)
        deadline = time.monotonic() + 10
        while running.thread.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not running.thread.alive
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/health")


def test_who_waits_for_a_shared_beginning_says_so() -> None:
    body = {"prompt": "long ago " * 11, "max_tokens": 3, "ignore_eos": True, "kvarn": True}
    with running_server(step_tokens=300) as server, client(server) as http:
        answers: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body).json()))
            for _ in range(3)
        ]
        server.thread.call(lambda e: time.sleep(0.5))  # so that all three come into the same step
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        waited = [a for a in answers if "with which both begin" in str(a["kvarn"])]
        assert len(waited) == 2
        cached = sorted(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers)
        assert cached[0] == 0 and cached[1] == cached[2] >= 64
        assert samples(http)["kvarn:steps_with_waiting_total"] >= 1
        with http.stream("GET", "/v1/kvarn/events", params={"replay": 1000}) as events:
            held = next(line for line in events.iter_lines() if "with which both begin" in line)
        assert json.loads(held.removeprefix("data: "))["kind"] == "request_held"
