"""Clients that go away, at any moment and with any cache: what they held comes back at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from support.serving import Running, client, running_server

ALSO = ("int8", "int4", "turbo3", "h2o:50%,recent=4", "snapkv:24,query_tokens=8")
CHOICES = (None, *ALSO, "window:8,sinks=2")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"send_timeout_s": 5}, also=ALSO, block_size=8, max_seqs=4) as running:
        yield running


def leave_after(server: Running, lines: int, choice: str | None, whole: bool) -> int:
    """Lines read before the connection was closed. whole: no stream is asked for; the client closes without reading."""
    body = {
        "prompt": f"{choice} and {lines}, told at length",
        "max_tokens": 80,
        "ignore_eos": True,
        "stream": not whole,
    }
    if choice is not None:
        body["kv"] = choice
    seen = 0
    with client(server) as http:
        if whole:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=0.001 * (1 + lines))
            return 0
        with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for _ in response.iter_lines():
                if seen >= lines:
                    break
                seen += 1
    return seen


@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole"])
def test_clients_that_leave_hold_nothing(server: Running, whole: bool) -> None:
    asked = [(lines, choice) for lines in (0, 1, 6, 30) for choice in CHOICES]
    with ThreadPoolExecutor(8) as clients:
        left = list(clients.map(lambda a: leave_after(server, *a, whole), asked))
    assert server.idle(30), "a request stays open"
    assert server.held()[0] == 0
    assert whole or all(seen == lines for seen, (lines, _) in zip(left, asked, strict=True))
    index = server.thread.call(lambda e: (e.cache.prefixes.reset(), e.cache.memory().blocks)[1]).result(10)
    assert index == 0, "blocks that nothing names"
