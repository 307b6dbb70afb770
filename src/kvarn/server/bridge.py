"""The engine on a thread of its own: commands go in by a queue, events come out to asyncio mailboxes.

Only this thread touches the engine. Between two steps it takes all commands that came meanwhile; a step's events reach
each event loop in one call, whatever the number of requests.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvarn.core.cache_params import CacheParams
from kvarn.core.requests import Delta, RequestOutput, SamplingParams
from kvarn.engine.engine import Engine, StepResult
from kvarn.engine.guide import Guide
from kvarn.engine.reasons import Ended
from kvarn.engine.request import RequestState
from kvarn.kv.ahead import BlocksAhead
from kvarn.kv.manager import CacheManager

T = TypeVar("T")
log = logging.getLogger("kvarn.server.engine")
FAILED_STEPS = 3  # in a row; then every open request ends with an error
PAUSE_S = 0.001  # after a step in which nobody could run


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt on its way to the engine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    namespace: bytes = b""
    deadline_s: float | None = None
    guide: Guide | None = None
    cache: CacheParams | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine took the request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine refused the request; nothing was spent on it."""

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Finished:
    """The request's last event. ended: why the scheduler ended it, if it did."""

    output: RequestOutput
    ended: Ended | None = None


Item = Accepted | Refused | Finished | Delta


class Mailbox:
    """Where a request's events arrive, on the loop that made it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[Item] = asyncio.Queue()


class Observer:
    """Is told on the engine's thread what happens. Must be quick and must not raise."""

    def on_accepted(self, work: Work, state: RequestState) -> None: ...

    def on_step(self, engine: Engine, result: StepResult) -> None: ...

    def on_finished(self, work: Work, finished: Finished) -> None: ...


@dataclass(slots=True)
class _Open:
    """A request in the engine. seq_ids: its completions'."""

    work: Work
    mailbox: Mailbox
    seq_ids: tuple[int, ...]
    ended: Ended | None = None


@dataclass(slots=True)
class _Outgoing:
    """Events of one round, by event loop."""

    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Item]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, mailbox: Mailbox, item: Item) -> None:
        self.by_loop[mailbox.loop].append((mailbox, item))

    def send(self) -> None:
        for loop, posts in self.by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, posts)
            except RuntimeError:  # the loop is closed: nobody is left to read
                log.debug("an event loop is closed; %d events dropped", len(posts))
        self.by_loop.clear()


def _deliver(posts: Iterable[tuple[Mailbox, Item]]) -> None:
    for mailbox, item in posts:
        mailbox.items.put_nowait(item)


class EngineThread:
    """Runs an engine until `stop`. All public methods may be called from any thread."""

    def __init__(self, engine: Engine, observers: Iterable[Observer] = ()) -> None:
        self._engine, self._observers = engine, tuple(observers)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._by_seq: dict[int, _Open] = {}
        self._out = _Outgoing()
        self._failed_steps = 0
        self._progress_s = time.monotonic()
        self._busy = False
        self._ahead = BlocksAhead(engine.cache.groups if isinstance(engine.cache, CacheManager) else ())
        self._thread = threading.Thread(target=self._run, name="kvarn-engine", daemon=True)

    # -- from outside ---------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Work, mailbox: Mailbox) -> None:
        """The mailbox gets Accepted, then Deltas, then Finished; or Refused."""
        self._commands.put(lambda: self._add(work, mailbox))

    def cancel(self, request_id: str) -> None:
        """End a request, if it is still open; its blocks are free before the next step."""
        self._commands.put(lambda: self._cancel(request_id))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function on the engine between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked did not wait for it
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(run)
        return future

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Cancel what is open and end the thread; False where a step takes longer than the timeout."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stalled_s(self) -> float:
        """Seconds since the last progress while there is work; 0 where there is none."""
        return time.monotonic() - self._progress_s if self._busy or not self._commands.empty() else 0.0

    # -- on the engine's thread -----------------------------------------------------------------------------------
    def _run(self) -> None:
        while self._take_commands():
            if self._engine.has_work:
                self._step()
            self._out.send()
        for request_id in list(self._open):
            self._cancel(request_id)
        self._out.send()

    def _take_commands(self) -> bool:
        """Everything that came meanwhile; waits for a command where there is no work. False: stop."""
        self._busy = self._engine.has_work
        if not self._busy:
            self._progress_s = time.monotonic()
            while self._commands.empty() and self._ahead.fill():
                pass
        try:
            command = self._commands.get(block=not self._busy)
            self._progress_s = self._progress_s if self._busy else time.monotonic()
            self._busy = True
            while command is not None:
                self._obey(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _obey(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:
            log.exception("a command to the engine failed")

    def _add(self, work: Work, mailbox: Mailbox) -> None:
        try:
            state = self._engine.add_request(
                work.request_id,
                work.prompt_ids,
                work.params,
                priority=work.priority,
                tenant=work.tenant,
                namespace=work.namespace,
                deadline_s=work.deadline_s,
                guide=work.guide,
                cache=work.cache,
            )
        except Exception as error:
            self._out.add(mailbox, Refused(work.request_id, error))
            return
        entry = _Open(work, mailbox, tuple(c.seq_id for c in state.completions))
        self._open[work.request_id] = entry
        self._by_seq.update((s, entry) for s in entry.seq_ids)
        self._out.add(mailbox, Accepted(work.request_id))
        self._tell(lambda o: o.on_accepted(work, state))

    def _cancel(self, request_id: str) -> None:
        if (output := self._engine.cancel(request_id)) is not None:
            self._close(output)

    def _close(self, output: RequestOutput) -> None:
        if (entry := self._open.pop(output.request_id, None)) is None:
            return
        for seq_id in entry.seq_ids:
            self._by_seq.pop(seq_id, None)
        finished = Finished(output, entry.ended)
        self._out.add(entry.mailbox, finished)
        self._tell(lambda o: o.on_finished(entry.work, finished))

    def _step(self) -> None:
        try:
            result = self._engine.step()
        except Exception:
            self._after_failure()
            return
        self._failed_steps = 0
        self._ahead.after_step()
        if result.plan.rows or result.plan.again or result.finished or result.deltas:
            self._progress_s = time.monotonic()
        else:
            time.sleep(PAUSE_S)
        self._publish(result)

    def _publish(self, result: StepResult) -> None:
        for ended in result.plan.ended:
            if entry := self._by_seq.get(ended.seq_id):
                entry.ended = ended
        for request_id, error in result.failures:
            log.error("request %s failed", request_id, exc_info=error)
        for delta in result.deltas:
            if entry := self._open.get(delta.request_id):
                self._out.add(entry.mailbox, delta)
        self._tell(lambda o: o.on_step(self._engine, result))
        for output in result.finished:
            self._close(output)

    def _after_failure(self) -> None:
        """Scheduling failed, which is nobody's fault alone; where it fails again and again, all requests end."""
        log.exception("a step failed")
        self._failed_steps += 1
        if self._failed_steps >= FAILED_STEPS:
            for request_id in list(self._open):
                self._cancel(request_id)
            self._failed_steps = 0

    def _tell(self, what: Callable[[Observer], Any]) -> None:
        for observer in self._observers:
            try:
                what(observer)
            except Exception:
                log.exception("an observer failed")
