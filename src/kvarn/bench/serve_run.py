"""Plays a load against a server: an open loop (arrivals do not wait for answers) or a closed one (users do)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import httpx

from kvarn.bench.serve_client import Record, Target, body_of, find_model, headers_of, send
from kvarn.bench.serve_load import Conversation, LoadSpec

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Run:
    """records: of all requests, by when they were sent. duration_s: from the first sending to the last end."""

    target: Target
    name: str
    records: tuple[Record, ...]
    duration_s: float


def open_http(connections: int, timeout_s: float) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(timeout_s))


async def with_model(target: Target, timeout_s: float) -> Target:
    """The target with the server's own model name where none was given. Raises InvalidRequest."""
    if target.model:
        return target
    async with open_http(1, timeout_s) as http:
        model = await find_model(http, target.url, headers_of(target))
    return replace(target, model=model)


async def play(
    target: Target,
    spec: LoadSpec,
    load: Sequence[Conversation],
    *,
    name: str = "",
    timeout_s: float = 600.0,
    progress: Progress = lambda done, total: None,
) -> Run:
    """Send all conversations; returns when the last answer ended."""
    connections = spec.users if spec.rate_per_s is None else len(load)
    records: list[Record] = []
    begun = time.perf_counter()
    async with open_http(connections, timeout_s) as http:
        player = _Player(http, target, records, begun, lambda: progress(len(records), len(load) * spec.turns))
        await (_closed(player, load, spec.users) if spec.rate_per_s is None else _open(player, load))
    ends_s = [r.sent_s + r.end_s for r in records]
    duration_s = max(ends_s) - min(r.sent_s for r in records)
    return Run(target, name, tuple(sorted(records, key=lambda r: r.sent_s)), duration_s)


@dataclass(frozen=True, slots=True)
class _Player:
    http: httpx.AsyncClient
    target: Target
    records: list[Record]
    begun: float
    after_each: Callable[[], None]

    async def converse(self, conversation: Conversation) -> None:
        """All turns in order, each with the whole history; an error ends the conversation."""
        messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        for index, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.pause_s)
            messages.append({"role": "user", "content": turn.text})
            record = Record(conversation.number, index, time.perf_counter() - self.begun)
            await send(self.http, self.target, body_of(self.target, messages, turn.output_tokens), record)
            self.records.append(record)
            self.after_each()
            if record.error is not None:
                return
            messages.append({"role": "assistant", "content": record.text})


async def _closed(player: _Player, load: Sequence[Conversation], users: int) -> None:
    waiting = list(reversed(load))

    async def user() -> None:
        while waiting:
            await player.converse(waiting.pop())

    await asyncio.gather(*(user() for _ in range(users)))


async def _open(player: _Player, load: Sequence[Conversation]) -> None:
    async def arrive(conversation: Conversation) -> None:
        await asyncio.sleep(max(0.0, player.begun + conversation.arrival_s - time.perf_counter()))
        await player.converse(conversation)

    await asyncio.gather(*(arrive(c) for c in load))
