"""Random clients of a soaked server, in a process of their own, so that the server's memory is the server's."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

CLIENTS = 24
STUCK_S = 180.0
EXPECTED = frozenset({200, 400, 404, 408, 413, 429})


@dataclass
class ClientReport:
    """outcomes: by status, or how the client left. lost: requests without an end."""

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    unexpected: list[str] = field(default_factory=list)


def play(url: str, seconds: float, seed: int) -> ClientReport:
    """24 clients, each sending one request after the other for so long."""
    report = ClientReport()
    asyncio.run(_play(url, report, seconds, seed))
    return report


async def _play(url: str, report: ClientReport, seconds: float, seed: int) -> None:
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=STUCK_S, limits=limits) as http:
        await asyncio.gather(*(_client(http, report, random.Random(f"{seed}/{i}"), end) for i in range(CLIENTS)))


async def _client(http: httpx.AsyncClient, report: ClientReport, source: random.Random, end: float) -> None:
    while time.monotonic() < end:
        try:
            await asyncio.wait_for(_request(http, report, source), STUCK_S)
        except (TimeoutError, httpx.TimeoutException):
            report.lost += 1
        except httpx.HTTPError as error:
            report.unexpected.append(type(error).__name__)


async def _request(http: httpx.AsyncClient, report: ClientReport, source: random.Random) -> None:
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


async def _read(report: ClientReport, response: httpx.Response, leave_after: int | None) -> None:
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


def _note(report: ClientReport, status: int, refused: bool = False) -> None:
    report.outcomes[str(status)] += 1
    if status not in EXPECTED or (refused and status == 200):
        report.unexpected.append(f"status {status}")


def _check_whole(report: ClientReport, body: dict[str, Any], answer: dict[str, Any]) -> None:
    reasons = [c["finish_reason"] for c in answer["choices"]]
    if len(reasons) != body["n"] or set(reasons) - {"stop", "length"}:
        report.unexpected.append(f"reasons {reasons}")
