"""Soaks a server: random clients that behave, leave, or send nonsense, over a pool far too small for them."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from support.serving import Running, running_server

CLIENTS = 24
STUCK_S = 60.0
WARM_SHARE = 0.3  # of the time, before memory is measured for the first time
GROWTH_BYTES = 24e6
EXPECTED = frozenset({200, 400, 404, 408, 413, 429})


@dataclass
class SoakReport:
    """lost: requests without an end. outcomes: by status, or how the client left. rss: bytes, warm and last."""

    seconds: float
    outcomes: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    unexpected: list[str] = field(default_factory=list)
    preemptions: int = 0
    leaked_sequences: int = -1
    ledger_error: str | None = None
    rss_warm: int = 0
    rss_end: int = 0

    @property
    def good(self) -> bool:
        clean = not (self.lost or self.unexpected or self.leaked_sequences or self.ledger_error)
        return clean and self.rss_end - self.rss_warm < GROWTH_BYTES

    def __str__(self) -> str:
        growth = (self.rss_end - self.rss_warm) / 1e6
        return (
            f"{'good' if self.good else 'BAD'}: {self.seconds:.0f} s, {sum(self.outcomes.values())} requests "
            f"{dict(self.outcomes)}, lost or stuck {self.lost}, unexpected {self.unexpected[:5]}, preemptions "
            f"{self.preemptions}, sequences left {self.leaked_sequences}, ledger {self.ledger_error or 'balanced'}, "
            f"memory grew {growth:+.1f} MB after warming"
        )


def soak(seconds: float, *, seed: int = 0, progress: bool = False) -> SoakReport:
    """Run a server and its clients for so long; the pool holds about 3 of the 24 clients' sequences."""
    report = SoakReport(seconds)
    limits = {"max_requests": CLIENTS - 2, "body_timeout_s": 2.0, "send_timeout_s": 5.0}
    with running_server(limits, kv_memory_bytes=_pool_bytes(), max_seqs=16, context_tokens=128, poison=False) as server:
        asyncio.run(_play(server, report, seconds, seed, progress))
        _settle(server, report)
    return report


def _pool_bytes() -> int:
    """About 400 tokens of the tiny model: 2 layers x K and V x 2 heads x 8 numbers x 4 bytes."""
    return 400 * 2 * 2 * 2 * 8 * 4


async def _play(server: Running, report: SoakReport, seconds: float, seed: int, progress: bool) -> None:
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(
        base_url=server.url, timeout=STUCK_S, limits=httpx.Limits(max_connections=None)
    ) as http:
        clients = [_client(http, report, random.Random(f"{seed}/{i}"), end) for i in range(CLIENTS)]
        await asyncio.gather(_watch(report, seconds, progress), *clients)


async def _watch(report: SoakReport, seconds: float, progress: bool) -> None:
    await asyncio.sleep(seconds * WARM_SHARE)
    report.rss_warm = _resident()
    left = seconds * (1 - WARM_SHARE)
    while left > 0:
        await asyncio.sleep(min(10, left))
        left -= 10
        if progress:
            done, held = sum(report.outcomes.values()), _resident() / 1e6
            sys.stderr.write(f"{max(0, left):.0f} s left, {done} requests, {held:.1f} MB\n")


async def _client(http: httpx.AsyncClient, report: SoakReport, source: random.Random, end: float) -> None:
    while time.monotonic() < end:
        try:
            await asyncio.wait_for(_request(http, report, source), STUCK_S)
        except (TimeoutError, httpx.TimeoutException):
            report.lost += 1
        except httpx.HTTPError as error:
            report.unexpected.append(type(error).__name__)


async def _request(http: httpx.AsyncClient, report: SoakReport, source: random.Random) -> None:
    kind = source.choices(("whole", "stream", "leave", "nonsense"), (4, 4, 4, 1))[0]
    if kind == "nonsense":
        body: Any = source.choice(["[", {"prompt": ""}, {"prompt": "x" * 400}, {"prompt": 3}, {"prompt": "x", "n": 0}])
        text = body if isinstance(body, str) else json.dumps(body)
        response = await http.post("/v1/completions", content=text, headers={"content-type": "application/json"})
        _note(report, response.status_code, refused=True)
        return
    body = _body(source)
    if kind == "whole":
        response = await http.post("/v1/completions", json=body)
        _note(report, response.status_code)
        if response.status_code == 200:
            _check_whole(report, body, response.json())
        return
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        _note(report, response.status_code)
        if response.status_code != 200:
            return
        await _read(report, response, leave_after=source.randint(0, 20) if kind == "leave" else None)


def _body(source: random.Random) -> dict[str, Any]:
    shared = source.choice(["", "a system prompt that many share. ", "another one, a little longer than the first. "])
    body: dict[str, Any] = {
        "prompt": shared + "".join(source.choices("abcdefgh ", k=source.randint(1, 30))),
        "max_tokens": source.randint(1, 40),
        "temperature": source.choice([0, 1]),
        "ignore_eos": source.random() < 0.7,
        "n": source.choice([1, 1, 1, 2, 3]),
        "priority": source.randint(0, 2),
        "kvarn": source.random() < 0.2,
    }
    if source.random() < 0.2:
        body["structured_outputs"] = {"regex": "[a-z]{1,20}"}
    if source.random() < 0.1:
        body["timeout_s"] = 0.05
    return body


async def _read(report: SoakReport, response: httpx.Response, leave_after: int | None) -> None:
    lines = 0
    async for line in response.aiter_lines():
        lines += bool(line)
        if leave_after is not None and lines > leave_after:
            report.outcomes["left"] += 1
            return
        if line.endswith("[DONE]"):
            return
        if '"error"' in line:
            if '"timeout"' not in line:
                report.unexpected.append(line[:300])
            return
    report.unexpected.append("a stream ended without [DONE]")


def _note(report: SoakReport, status: int, refused: bool = False) -> None:
    report.outcomes[str(status)] += 1
    if status not in EXPECTED or (refused and status == 200):
        report.unexpected.append(f"status {status}")


def _check_whole(report: SoakReport, body: dict[str, Any], answer: dict[str, Any]) -> None:
    reasons = [c["finish_reason"] for c in answer["choices"]]
    if len(reasons) != body["n"] or set(reasons) - {"stop", "length"}:
        report.unexpected.append(f"reasons {reasons}")


def _settle(server: Running, report: SoakReport) -> None:
    """Everything must come back: no open request, no sequence, a balanced ledger."""
    if not server.idle(STUCK_S):
        report.lost += 1
    report.leaked_sequences = server.held()[0]
    try:
        server.thread.call(lambda e: e.cache.check()).result(30)
    except AssertionError as error:
        report.ledger_error = str(error)
    text = server.context.metrics.text().decode()
    report.preemptions = int(float(next(x for x in text.splitlines() if "num_preemptions_total{" in x).split()[-1]))
    report.rss_end = _resident()


def _resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss
