"""/health, /metrics and Kvarn's own looks inside: /v1/kvarn/stats, /v1/kvarn/events, the dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from kvarn.kv.settling import formats_of
from kvarn.server.context import ServerContext
from kvarn.server.errors import ApiError, json_response, to_json
from kvarn.server.events import KEPT, listen
from kvarn.server.gate import tenant_of
from kvarn.server.metrics import Snapshot, snapshot
from kvarn.server.routes.docs import errors
from kvarn.server.schema.other import Health
from kvarn.server.tenants import Tenant

ASK_TIMEOUT_S = 2.0
IDLE_S = 15.0
_EVENTS: dict[str, Any] = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
_TEXT: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}}}
_HTML: dict[str, Any] = {"content": {"text/html": {"schema": {"type": "string"}}}}


def make_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["state"])

    @router.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> Response:
        """503 where the engine makes no progress although it has work."""
        status, stalled_s = _status(context)
        body = {"status": status, "stalled_s": round(stalled_s, 3), "open_requests": context.desk.open_requests}
        return json_response(body, 200 if status == "ok" else 503)

    @router.get("/metrics", response_class=Response, responses={200: _TEXT})
    async def metrics() -> Response:
        """Prometheus' text format."""
        if (now := await _ask(context)) is not None:
            context.metrics.update(now)
        return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/kvarn/stats", responses=errors(401, 403, 503))
    async def stats(request: Request) -> dict[str, Any]:
        """The cache and the queue now."""
        _only_admin(tenant_of(request.scope))
        if (now := await _ask(context)) is None:
            raise ApiError(503, f"the engine did not answer within {ASK_TIMEOUT_S:g} s", code="stalled")
        return _stats(context, now)

    @router.get("/v1/kvarn/events", response_class=Response, responses={200: _EVENTS, **errors(400, 401, 503)})
    async def events(request: Request, replay: Annotated[int, Query(ge=0, le=KEPT)] = 0) -> Response:
        """What scheduler and cache do, as server-sent events; replay: so many of the past first. Without admin rights
        only one's own requests'."""
        if context.desk.draining:
            raise ApiError(503, "the server is ending", code="draining")
        stream = _events(context, tenant_of(request.scope), replay)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    @router.get("/dashboard", response_class=HTMLResponse, responses={200: _HTML})
    async def dashboard() -> Response:
        """A page that shows the stats and the events."""
        return _page("dashboard.html")

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """A page that shows /openapi.json. It needs nothing from elsewhere, so it works without a network."""
        return _page("api.html")

    @router.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("/dashboard")

    return router


def _page(name: str) -> HTMLResponse:
    return HTMLResponse(files("kvarn.server").joinpath(name).read_text(encoding="utf-8"))


def _status(context: ServerContext) -> tuple[str, float]:
    stalled_s = context.thread.stalled_s()
    if not context.thread.alive:
        return "stopped", stalled_s
    if context.desk.draining:
        return "draining", stalled_s
    return ("stalled" if stalled_s > context.settings.stall_s else "ok"), stalled_s


async def _ask(context: ServerContext) -> Snapshot | None:
    """Asked between two steps; None where the engine does not come to it."""
    if not context.thread.alive:
        return None
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return await asyncio.wrap_future(context.thread.call(snapshot))
    except TimeoutError:
        return None


def _only_admin(tenant: Tenant) -> None:
    if not tenant.admin:
        raise ApiError(403, "for admins only", code="not_admin", fixes=("admin = true in the file of API keys",))


def _stats(context: ServerContext, now: Snapshot) -> dict[str, Any]:
    memory = now.memory
    return {
        "model": context.model_name,
        "running": now.running,
        "waiting": now.waiting,
        "open_requests": context.desk.open_requests,
        "max_seqs": context.plan.max_seqs,
        "kv": {
            "cache": context.plan.mode,
            **asdict(context.kv_got(None)),
            "formats": formats_of(context.plan),
            "block_size": context.plan.block_size,
            "bytes_per_token": context.plan.bytes_per_token,
            **asdict(memory),
            "spare_bytes": now.spare_bytes,
            "utilisation": round(memory.utilisation, 4),
        },
    }


async def _events(context: ServerContext, tenant: Tenant, replay: int) -> AsyncIterator[bytes]:
    """A comment every IDLE_S keeps the connection open."""
    with context.events.subscribe(tenant, replay) as subscriber:
        yield b": kvarn events\n\n"
        async for event in listen(subscriber, IDLE_S):
            if event is None:
                yield b": idle\n\n"
            else:
                yield b"event: " + event["kind"].encode() + b"\ndata: " + to_json(event) + b"\n\n"
