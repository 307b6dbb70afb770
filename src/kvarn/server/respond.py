"""Runs one API request to its end: whole or streamed; a client that leaves takes its request with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvarn.core.requests import Delta
from kvarn.server.answers import ChunkWriter, Form, raise_if_failed, usage_of, whole
from kvarn.server.bridge import Finished, Work
from kvarn.server.context import ServerContext
from kvarn.server.desk import Ticket
from kvarn.server.errors import ApiError, json_response, to_json
from kvarn.server.gate import Note, note_of
from kvarn.server.schema.common import Shared
from kvarn.server.tenants import Tenant

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


async def answer(
    context: ServerContext, request: Request, tenant: Tenant, body: Shared, form: Form, works: Sequence[Work]
) -> Response:
    """Raises ApiError, KvarnError; ClientDisconnect where nobody waits any longer."""
    ticket = context.desk.open(works, tenant)
    note = note_of(request.scope)
    try:
        await _unless_gone(request, ticket.accepted())
        if body.stream:
            response = _Stream(context, body, form, ticket, note)
            ticket = None  # it closes the ticket
            return response
        results = await _unless_gone(request, ticket.results())
        note.usage = usage_of([r.output for r in results])
        note.ttft_s = results[0].output.timings.ttft_s
        raise_if_failed(results)
        return json_response(whole(context, body, form, works[0].cache, results))
    finally:
        if ticket is not None:
            ticket.close()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is stopped when the client leaves. Raises ClientDisconnect then."""
    running, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((running, leaving), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientDisconnect
    finally:
        running.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(StreamingResponse):
    """Server-sent events; whatever happens, the ticket is closed."""

    def __init__(self, context: ServerContext, body: Shared, form: Form, ticket: Ticket, note: Note) -> None:
        self._ticket, self._note = ticket, note
        self._writer = ChunkWriter(context, body, form, ticket.works)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), media_type="text/event-stream", headers=headers)

    async def _events(self) -> AsyncIterator[bytes]:
        for chunk in self._writer.opening():
            yield _event(chunk)
        try:
            async for item in self._ticket.items():
                if isinstance(item, Finished):
                    raise_if_failed((item,))
                elif isinstance(item, Delta) and item.finish_reason in (None, "stop", "length"):
                    for chunk in self._writer.piece(item):
                        yield _event(chunk)
        except ApiError as error:
            self._note.error = error
            yield _event(error.body())
            return
        results = [self._ticket.finished[w.request_id] for w in self._ticket.works]
        self._note.usage = usage_of([r.output for r in results])
        self._note.ttft_s = results[0].output.timings.ttft_s
        for chunk in self._writer.closing(results):
            yield _event(chunk)
        yield DONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
            self._note.gone = len(self._ticket.finished) < len(self._ticket.works) and self._note.error is None
        finally:
            self._ticket.close()


def _event(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
