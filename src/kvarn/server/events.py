"""What the scheduler and the cache do, as a stream for /v1/kvarn/events: numbers and reasons, never texts or tokens."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvarn.core.events import Event
from kvarn.engine.engine import Engine, StepResult
from kvarn.engine.request import RequestState
from kvarn.server.bridge import Finished, Observer, Work
from kvarn.server.tenants import Tenant

KEPT = 1_000
PER_SUBSCRIBER = 4_096


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """kind: such as request_admitted. tenant: whose it is; None: of the whole engine, for admins only."""

    number: int
    at_s: float
    kind: str
    tenant: str | None
    data: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"number": self.number, "at_s": round(self.at_s, 6), "kind": self.kind, **self.data}


class _Subscriber:
    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[ServerEvent | None] = asyncio.Queue(PER_SUBSCRIBER)
        self.dropped = 0

    def sees(self, event: ServerEvent) -> bool:
        return self.tenant.admin or (event.tenant is not None and event.tenant == self.tenant.name)

    def offer(self, event: ServerEvent) -> None:
        """On the subscriber's loop. One that reads too slowly loses events, and is told how many."""
        try:
            self.queue.put_nowait(event)
        except asyncio.QueueFull:
            self.dropped += 1


class EventHub(Observer):
    """Keeps the last events and hands new ones to those who listen. Called on the engine's thread."""

    def __init__(self) -> None:
        self._recent: deque[ServerEvent] = deque(maxlen=KEPT)
        self._subscribers: list[_Subscriber] = []
        self._numbers = itertools.count(1)
        self._owners: dict[int, Work] = {}  # by sequence

    # -- from the engine ------------------------------------------------------------------------------------------
    def on_cache(self, event: Event) -> None:
        """The cache manager's sink."""
        data = asdict(event)
        self._publish(_kind(event), self._owners.get(event.seq_id), data)

    def on_accepted(self, work: Work, state: RequestState) -> None:
        self._owners.update((c.seq_id, work) for c in state.completions)
        data = {"prompt_tokens": len(work.prompt_ids), "seq_ids": [c.seq_id for c in state.completions]}
        self._publish("request_queued", work, data)

    def on_step(self, engine: Engine, result: StepResult) -> None:
        plan = result.plan
        for admitted in plan.admitted:
            self._publish("request_admitted", self._owners.get(admitted.seq_id), asdict(admitted))
        for kind, reasons in (
            ("preempted", plan.preempted),
            ("stalled", plan.stalled),
            ("held", plan.held),
            ("ended", plan.ended),
        ):
            for reason in reasons:
                data = {"seq_id": reason.seq_id, "why": str(reason)}
                self._publish(f"request_{kind}", self._owners.get(reason.seq_id), data)
        self._publish("step", None, _step_data(engine, result))

    def on_finished(self, work: Work, finished: Finished) -> None:
        output = finished.output
        for seq_id in [s for s, owner in self._owners.items() if owner is work]:
            del self._owners[seq_id]
        data = {
            "cached_tokens": output.cached_tokens,
            "completions": [
                {"tokens": len(c.token_ids), "reason": c.finish_reason, **(asdict(c.trace) if c.trace else {})}
                for c in output.completions
            ],
            **asdict(output.timings),
        }
        self._publish("request_finished", work, data)

    def _publish(self, kind: str, work: Work | None, data: dict[str, Any]) -> None:
        if work is not None:
            data = {"request_id": work.request_id, **data}
        event = ServerEvent(next(self._numbers), time.time(), kind, work.tenant if work else None, data)
        self._recent.append(event)
        for subscriber in self._subscribers:
            if subscriber.sees(event):
                subscriber.loop.call_soon_threadsafe(subscriber.offer, event)

    # -- from a route ---------------------------------------------------------------------------------------------
    @contextmanager
    def subscribe(self, tenant: Tenant, replay: int = 0) -> Iterator[_Subscriber]:
        """A subscriber while the block lasts; replay: events of the past that come first."""
        subscriber = _Subscriber(tenant)
        past = [e for e in tuple(self._recent) if subscriber.sees(e)]
        for event in past[-replay:] if replay else ():
            subscriber.offer(event)
        self._subscribers = [*self._subscribers, subscriber]
        try:
            yield subscriber
        finally:
            self._subscribers = [s for s in self._subscribers if s is not subscriber]

    def end(self) -> None:
        """No subscriber waits any longer. On the event loop."""
        for subscriber in self._subscribers:
            if subscriber.queue.full():
                subscriber.queue.get_nowait()
            subscriber.queue.put_nowait(None)


async def listen(subscriber: _Subscriber, idle_s: float) -> AsyncIterator[dict[str, Any] | None]:
    """Events as they come; None after idle_s without one. Ends when the hub ends."""
    while True:
        try:
            async with asyncio.timeout(idle_s):
                event = await subscriber.queue.get()
        except TimeoutError:
            yield None
            continue
        if event is None:
            return
        if subscriber.dropped:
            yield {"kind": "dropped", "events": subscriber.dropped}
            subscriber.dropped = 0
        yield event.as_dict()


def _kind(event: Event) -> str:
    """BlocksTaken -> blocks_taken."""
    name = type(event).__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _step_data(engine: Engine, result: StepResult) -> dict[str, Any]:
    plan = result.plan
    return {
        "duration_s": round(result.duration_s, 6),
        "rows": len(plan.rows),
        "tokens": sum(r.new_tokens for r in plan.rows),
        "running": engine.scheduler.n_running,
        "waiting": plan.n_waiting,
        "head_wait": str(plan.head_wait) if plan.head_wait is not None else None,
    }
