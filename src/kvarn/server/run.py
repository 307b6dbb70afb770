"""Runs a server until it is told to stop: then no new requests, the open ones to their end, then the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvarn.server.app import make_app
from kvarn.server.context import ServerContext
from kvarn.server.gate import OVERLOAD

MAX_HEADER_BYTES = 64 * 1024
EXTRA_CONNECTIONS = 256  # beside the open requests: idle ones, health, metrics


def serve(context: ServerContext, on_ready: Callable[[str], None]) -> None:
    """Blocks until SIGINT or SIGTERM; a second one does not wait for open requests. on_ready: gets the address."""
    make_server(context, on_ready).run()


def make_server(context: ServerContext, on_ready: Callable[[str], None] = lambda url: None) -> DrainingServer:
    settings = context.settings
    config = uvicorn.Config(
        make_app(context),
        host=settings.host,
        port=settings.port,
        http=_protocol(settings.header_timeout_s, settings.max_requests + EXTRA_CONNECTIONS),
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(settings.keep_alive_s)),
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=2048,
    )
    return DrainingServer(config, context, on_ready)


class DrainingServer(uvicorn.Server):
    """Ends the event streams, which have no end of their own, before it waits for open requests."""

    def __init__(self, config: uvicorn.Config, context: ServerContext, on_ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._context, self._on_ready = context, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.servers and (bound := self.servers[0].sockets):
            host, port = bound[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.desk.draining = True
        self._context.events.end()
        await super().shutdown(sockets)


def _protocol(header_timeout_s: float, most_connections: int) -> type[H11Protocol]:
    """HTTP/1.1 that closes a connection on which a request's headers do not arrive whole in time, and that tells the
    gate where more connections are open than may be (uvicorn's own answer to that is plain text)."""

    class Timed(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            app = self.app

            async def counted(scope: Any, receive: Any, send: Any) -> None:
                open_now = max(len(self.connections), len(self.tasks))
                if open_now > most_connections:
                    scope.setdefault("state", {})[OVERLOAD] = open_now
                await app(scope, receive, send)

            self.app = counted

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_watching()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """The clock runs while bytes came but no request is being answered."""
            if self._answering:
                self._stop_watching()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(header_timeout_s, self._too_slow)

        def _stop_watching(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        @property
        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _too_slow(self) -> None:
            self._deadline = None
            if not self._answering and not self.transport.is_closing():
                self.transport.close()

    return Timed
