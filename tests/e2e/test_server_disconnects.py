"""Clients that go away, at any moment and with any cache: what they held comes back at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvarn.engine.engine import Engine
from support.engines import SMALL, block_bytes
from support.models import tiny_model
from support.serving import Running, client, running_server

BLOCK_BYTES = block_bytes(tiny_model("llama"), replace(SMALL, block_size=8))
ALSO = ("int8", "int4", "turbo3", "h2o:50%,recent=4", "snapkv:24,query_tokens=8")
NARROW = ("fp8_e4m3", "int3", "int2", "turbo4", "turbo2", "k=int8,v=int4")
OTHERS = ("tova:16,recent=4", "scissorhands:50%", "adakv:50%,query_tokens=8", "keydiff:50%,recent=4")
SERVERS: dict[str, tuple[dict[str, Any], tuple[str | None, ...]]] = {
    "usual": ({"also": ALSO, "max_seqs": 4}, (None, *ALSO, "window:8,sinks=2")),
    "formats": ({"also": NARROW, "max_seqs": 4}, (None, *NARROW)),
    "policies": ({"kv": "int8", "also": OTHERS, "max_seqs": 4}, (None, *OTHERS, "window:16")),
    "read again": ({"policy": "kvzip:24,sinks=2", "grain": "head", "max_seqs": 2}, (None, "full", "window:16")),
    "tiers": ({"policy": "tiered:24", "max_seqs": 2}, (None, "full")),
    "too small": ({"kv_memory_bytes": 36 * BLOCK_BYTES, "max_seqs": 6}, (None, "window:16")),
}


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Running, tuple[str | None, ...]]]:
    """With the choices of cache that its clients may ask for."""
    options, choices = SERVERS[request.param]
    with running_server({"send_timeout_s": 5}, block_size=8, **options) as running:
        yield running, choices


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
def test_clients_that_leave_hold_nothing(server: tuple[Running, tuple[str | None, ...]], whole: bool) -> None:
    running, choices = server
    asked = [(lines, choice) for lines in (0, 1, 6, 30) for choice in choices]
    with ThreadPoolExecutor(8) as clients:
        left = list(clients.map(lambda a: leave_after(running, *a, whole), asked))
    assert running.idle(30), "a request stays open"
    assert running.held()[0] == 0
    assert whole or all(seen == lines for seen, (lines, _) in zip(left, asked, strict=True))
    index = running.thread.call(_without_prefixes).result(10)
    assert index == 0, "blocks that nothing names"


def _without_prefixes(engine: Engine) -> int:
    """Blocks held once nothing is kept for requests to come."""
    if engine.cache.prefixes is not None:
        engine.cache.prefixes.reset()
    return engine.cache.memory().blocks
