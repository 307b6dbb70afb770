"""A whole server over a tiny model, on a free port, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kvarn.core.options import EngineOptions
from kvarn.engine.build import Parts, assemble
from kvarn.engine.engine import Engine
from kvarn.kernels import load_backend
from kvarn.server.bridge import EngineThread
from kvarn.server.context import ServerContext, build_context
from kvarn.server.events import EventHub
from kvarn.server.run import make_server
from kvarn.server.settings import ServerSettings
from support.engines import SMALL
from support.models import byte_tokenizer, tiny_model

MODEL = "tiny"


@dataclass(frozen=True)
class Running:
    """A server that answers at `url`."""

    url: str
    context: ServerContext
    engine: Engine
    server: Any

    @property
    def thread(self) -> EngineThread:
        return self.context.thread

    def held(self) -> tuple[int, int]:
        """(sequences, blocks that a sequence holds) between two steps."""
        memory = self.thread.call(lambda e: e.cache.memory()).result(10)
        return memory.sequences, memory.blocks

    def idle(self, timeout_s: float = 10.0) -> bool:
        """Wait until nothing is open; False where something stays."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            open_now = self.context.desk.open_requests
            if not open_now and not self.thread.call(lambda e: e.has_work).result(timeout_s):
                self.thread.call(lambda e: e.cache.check()).result(timeout_s)
                return True
            time.sleep(0.01)
        return False


def tiny_parts(events: EventHub | None = None, **options: Any) -> Parts:
    asked = EngineOptions(**{**{f: getattr(SMALL, f) for f in SMALL.__dataclass_fields__}, **options})
    sink = events.on_cache if events else None
    return assemble(tiny_model("llama"), byte_tokenizer(), load_backend(), asked, emit=sink)


@contextmanager
def running_server(settings: dict[str, Any] | None = None, **options: Any) -> Iterator[Running]:
    """settings: fields of ServerSettings; options: fields of EngineOptions."""
    engines: list[Engine] = []

    def build(events: EventHub) -> Parts:
        parts = tiny_parts(events, **options)
        engines.append(parts.engine)
        return parts

    context = build_context(ServerSettings(port=0, drain_s=2, **(settings or {})), MODEL, build)
    urls: list[str] = []
    server = make_server(context, urls.append)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not urls and time.monotonic() < end:
        time.sleep(0.005)
    try:
        yield Running(urls[0], context, engines[0], server)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


def client(running: Running, **more: Any) -> httpx.Client:
    return httpx.Client(base_url=running.url, timeout=30, **more)
