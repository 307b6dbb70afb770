"""The door before every route: request ids, API keys, limits on bodies and slow clients, one log line a request."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvarn.server.context import ServerContext
from kvarn.server.errors import CLIENT_GONE, ApiError, error_response, from_exception
from kvarn.server.tenants import Tenant

log = logging.getLogger("kvarn.server.request")
OPEN_PATHS = ("/health", "/metrics", "/openapi.json", "/docs", "/dashboard", "/")
OVERLOAD = "overload"  # key of the scope's state: how many connections are open, where that is too many
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|$)', re.DOTALL)
_NOT_BRACKETS = re.compile(rb"[^\[\]{}]+")


@dataclass(slots=True)
class Note:
    """What the log line of a request will say; routes write into it. Never a text."""

    request_id: str
    usage: dict[str, Any] | None = None
    ttft_s: float | None = None
    error: ApiError | None = None
    gone: bool = False
    status: int = 0
    begun_s: float = field(default_factory=time.monotonic)


def note_of(scope: Scope) -> Note:
    return scope["state"]["note"]


def tenant_of(scope: Scope) -> Tenant:
    return scope["state"]["tenant"]


class Gate:
    """ASGI middleware. Nothing passes that is too large, too deep, too slow or without a key."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = Note(_header(scope, b"x-request-id")[:64] or uuid.uuid4().hex)
        scope.setdefault("state", {}).update(note=note)
        timed = self._timed(send, note)
        try:
            await self._pass(scope, receive, timed, note)
        except ClientDisconnect:
            note.gone = True
        except Exception as error:
            note.error = from_exception(error)
            if not note.status:
                await error_response(note.error)(scope, receive, timed)
            else:
                raise  # the answer has begun: closing the connection is all that is left
        finally:
            self._log(scope, note)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, note: Note) -> None:
        if (open_now := scope["state"].get(OVERLOAD)) is not None:
            raise ApiError(
                503,
                f"{open_now} connections are open, more than this server serves",
                code="too_many_connections",
                fixes=("close idle connections", "try again later"),
                headers={"Retry-After": str(self._context.desk.retry_s()), "Connection": "close"},
            )
        tenant = self._context.tenants.of(_header(scope, b"authorization") or None)
        if tenant is None and scope["path"] not in OPEN_PATHS:
            raise ApiError(
                401,
                "no valid API key in the Authorization header",
                code="invalid_api_key",
                fixes=("send Authorization: Bearer KEY",),
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope["state"]["tenant"] = tenant
        if scope["method"] in ("POST", "PUT", "PATCH"):
            receive = _replay(await self._body(scope, receive), receive)
        await self._app(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises ApiError 413, 408, 400."""
        most = self._context.settings.max_body_bytes
        kind = _header(scope, b"content-type").partition(";")[0].strip().lower()
        if kind != "application/json":  # a browser sends other types from any page without asking
            what = f"the body's Content-Type is {kind[:100] or 'missing'}"
            raise ApiError(400, what, code="content_type", fixes=("send Content-Type: application/json",))
        stated = _header(scope, b"content-length")
        if stated.isdigit() and int(stated) > most:
            raise _too_large(int(stated), most)
        try:
            async with asyncio.timeout(self._context.settings.body_timeout_s):
                body = await _read(receive, most)
        except TimeoutError as error:
            limit = self._context.settings.body_timeout_s
            raise ApiError(408, f"the body took longer than {limit:g} s", code="timeout") from error
        depth, limit = json_depth(body), self._context.settings.max_json_depth
        if depth > limit:
            raise ApiError(400, f"the body is nested {depth} levels deep; at most {limit}", code="too_deep")
        return body

    def _timed(self, send: Send, note: Note) -> Send:
        """A client that takes nothing for send_timeout_s is left."""
        limit_s = self._context.settings.send_timeout_s

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", note.request_id.encode("latin-1")))
            try:
                async with asyncio.timeout(limit_s):
                    await send(message)
            except TimeoutError as error:
                raise ClientDisconnect from error

        return timed

    def _log(self, scope: Scope, note: Note) -> None:
        status = CLIENT_GONE if note.gone else note.status
        route = getattr(scope.get("route"), "path", "-")
        self._context.metrics.count_http(scope["method"], route, status)
        tenant = scope["state"].get("tenant")
        fields = {
            "request_id": note.request_id,
            "tenant": tenant.name if tenant else None,
            "method": scope["method"],
            "route": route,
            "status": status,
            "duration_s": round(time.monotonic() - note.begun_s, 6),
            "ttft_s": round(note.ttft_s, 6) if note.ttft_s is not None else None,
            "usage": note.usage,
            "error": note.error.code or note.error.type if note.error else None,
        }
        log.info("request", extra={"fields": fields})


def _header(scope: Scope, name: bytes) -> str:
    return next((v.decode("latin-1") for k, v in scope["headers"] if k == name), "")


def _too_large(size: int, most: int) -> ApiError:
    return ApiError(413, f"the body has {size} bytes; at most {most}", code="body_too_large", fixes=("send less",))


async def _read(receive: Receive, most: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > most:
            raise _too_large(len(body), most)
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read already, then what comes after it."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay


def json_depth(body: bytes) -> int:
    """How deep brackets are nested outside strings; linear in the body, and right for text that is no JSON too."""
    deepest = depth = 0
    for bracket in _NOT_BRACKETS.sub(b"", _STRING.sub(b"", body)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest
