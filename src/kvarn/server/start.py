"""From settings to a running server."""

from __future__ import annotations

from collections.abc import Callable

from kvarn.core.options import EngineOptions
from kvarn.engine.build import Parts, build_engine
from kvarn.hub import default_name, resolve
from kvarn.server.context import build_context
from kvarn.server.events import EventHub
from kvarn.server.logs import start_logging
from kvarn.server.run import serve
from kvarn.server.settings import ServerSettings

__all__ = ["serve_model", "start_logging"]


def serve_model(
    model: str | None, settings: ServerSettings, options: EngineOptions, on_ready: Callable[[str], None]
) -> None:
    """Load a model and serve it until told to stop. Raises FetchError, ModelError, DoesNotFit, IncompatiblePlan,
    InvalidRequest."""
    files = resolve(model or default_name())

    def build(events: EventHub) -> Parts:
        return build_engine(files, options, events.on_cache)

    serve(build_context(settings, settings.served_name or files.name, build), on_ready)
