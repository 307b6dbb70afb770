"""Puts routes, door and errors together into one ASGI app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvarn import __version__
from kvarn.core.registry import names_in
from kvarn.server import errors
from kvarn.server.context import ServerContext
from kvarn.server.gate import OPEN_PATHS, Gate

_ROUTES = "kvarn.server.routes"


def make_app(context: ServerContext) -> FastAPI:
    """The app of one server; it starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context.thread.start()
        yield
        await asyncio.to_thread(context.thread.stop, context.settings.drain_s + context.settings.stall_s)

    app = FastAPI(
        title="Kvarn",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own page fetches its scripts from elsewhere: see routes/state.py
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    for name in names_in(_ROUTES):
        module = import_module(f"{_ROUTES}.{name}")
        if (make_router := getattr(module, "make_router", None)) is not None:
            app.include_router(make_router(context))
    errors.install(app)
    app.add_middleware(Gate, context=context)
    app.openapi = lambda: _openapi(app, context)  # pyright: ignore[reportAttributeAccessIssue]
    return app


def _openapi(app: FastAPI, context: ServerContext) -> dict[str, Any]:
    """FastAPI's description, without its own form of errors, with the API keys."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                if context.tenants.keys_needed and path not in OPEN_PATHS:
                    operation["security"] = [{"bearer": []}]
        components = schema.setdefault("components", {})
        for name in ("HTTPValidationError", "ValidationError"):
            components.get("schemas", {}).pop(name, None)
        if context.tenants.keys_needed:
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
    return app.openapi_schema
