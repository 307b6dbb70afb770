"""Between the routes and the engine's thread: counts what is open, refuses what is too much, takes back the rest."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence

from kvarn.server.bridge import Accepted, EngineThread, Finished, Item, Mailbox, Refused, Work
from kvarn.server.errors import ApiError
from kvarn.server.settings import ServerSettings
from kvarn.server.tenants import Tenant

REMEMBERED = 64  # finished requests, for the estimate in Retry-After
MAX_RETRY_S = 60


class Ticket:
    """One API request's open prompts (several for a list of prompts). Close it whatever happens: what is not finished
    is cancelled then."""

    def __init__(self, desk: Desk, works: Sequence[Work], tenant: Tenant) -> None:
        self._desk, self.works, self.tenant = desk, tuple(works), tenant
        self._mailbox = Mailbox()
        self._unfinished = {w.request_id for w in works}
        self.finished: dict[str, Finished] = {}
        self.closed = False

    async def accepted(self) -> None:
        """Wait until the engine took all prompts. Raises what it refused one with."""
        for work in self.works:
            self._desk.thread.submit(work, self._mailbox)
        waiting = set(self._unfinished)
        early: list[Item] = []
        while waiting:
            item = await self._mailbox.items.get()
            if isinstance(item, Refused):
                self._unfinished.discard(item.request_id)
                raise item.error
            if isinstance(item, Accepted):
                waiting.discard(item.request_id)
            else:
                early.append(item)
        while not self._mailbox.items.empty():
            early.append(self._mailbox.items.get_nowait())
        for item in early:
            self._mailbox.items.put_nowait(item)

    async def items(self) -> AsyncIterator[Item]:
        """Deltas and Finished as they come, until all prompts are finished."""
        while self._unfinished:
            item = await self._mailbox.items.get()
            if isinstance(item, Finished):
                self._unfinished.discard(item.output.request_id)
                self.finished[item.output.request_id] = item
            yield item

    async def results(self) -> list[Finished]:
        """All prompts' ends, in their order."""
        async for _ in self.items():
            pass
        return [self.finished[w.request_id] for w in self.works]

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for request_id in self._unfinished:
            self._desk.thread.cancel(request_id)
        self._desk.give_back(self)


class Desk:
    """Lives on one event loop."""

    def __init__(self, thread: EngineThread, settings: ServerSettings, max_seqs: int) -> None:
        self.thread, self._settings, self._max_seqs = thread, settings, max_seqs
        self._requests: Counter[str] = Counter()
        self._answers = 0
        self._took_s: deque[float] = deque(maxlen=REMEMBERED)
        self.draining = False

    @property
    def open_requests(self) -> int:
        return self._requests.total()

    def open(self, works: Sequence[Work], tenant: Tenant) -> Ticket:
        """Raises ApiError 429 where too much is open, 503 while the server ends."""
        answers = sum(w.params.n for w in works)
        self._refuse_if_full(answers, tenant)
        self._requests[tenant.name] += 1
        self._answers += answers
        return Ticket(self, works, tenant)

    def give_back(self, ticket: Ticket) -> None:
        self._requests[ticket.tenant.name] -= 1
        self._answers -= sum(w.params.n for w in ticket.works)
        for finished in ticket.finished.values():
            times = finished.output.timings
            self._took_s.append(times.ttft_s + times.decode_s)

    def _refuse_if_full(self, answers: int, tenant: Tenant) -> None:
        limits = self._settings
        if self.draining:
            raise ApiError(503, "the server is ending", code="draining", headers={"Retry-After": "5"})
        if not self.thread.alive:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        most = self._max_seqs + limits.max_queue
        if answers > most:
            raise ApiError(400, f"{answers} answers in one request; at most {most}", code="too_many_answers", param="n")
        if self.open_requests >= limits.max_requests:
            self._busy(f"{self.open_requests} requests are open, of at most {limits.max_requests}")
        if self._answers + answers > most:
            self._busy(f"{self._answers} answers are open and {answers} more asked for, of at most {most}")
        if tenant.max_requests is not None and self._requests[tenant.name] >= tenant.max_requests:
            self._busy(f"your {self._requests[tenant.name]} requests are open, of at most {tenant.max_requests}")

    def _busy(self, why: str) -> None:
        raise ApiError(
            429, why, code="too_many_requests", fixes=("try again later",), headers={"Retry-After": str(self.retry_s())}
        )

    def retry_s(self) -> int:
        """Seconds after which a place should be free: the open answers' share of what a request took lately."""
        mean_s = sum(self._took_s) / len(self._took_s) if self._took_s else 1.0
        return max(1, min(MAX_RETRY_S, math.ceil(mean_s * self._answers / self._max_seqs / 4)))
