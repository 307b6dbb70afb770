"""What the routes of one server share. Made once, handed to the app, never global."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvarn.core.cache_params import CacheParams
from kvarn.core.options import CachePlan
from kvarn.engine.build import Parts
from kvarn.engine.engine import Engine
from kvarn.kv.policies.base import KVPolicy
from kvarn.server.bridge import EngineThread
from kvarn.server.desk import Desk
from kvarn.server.errors import ApiError
from kvarn.server.events import EventHub
from kvarn.server.guided import GuideMaker
from kvarn.server.kv_choice import KVGot, got
from kvarn.server.metrics import Metrics
from kvarn.server.settings import ServerSettings
from kvarn.server.tenants import Tenants, load_tenants
from kvarn.text import Tokenizer


@dataclass(frozen=True)
class ServerContext:
    """most_tokens: prompt and answer together, as far as context and cache allow. created: Unix seconds."""

    settings: ServerSettings
    model_name: str
    tokenizer: Tokenizer
    vocab_size: int
    plan: CachePlan
    most_tokens: int
    thread: EngineThread
    desk: Desk
    tenants: Tenants
    metrics: Metrics
    events: EventHub
    guides: GuideMaker
    policy: KVPolicy | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def kv_got(self, chosen: CacheParams | None) -> KVGot:
        """The cache that a request has: the one it chose, or the server's."""
        return got(chosen, self.plan, self.policy)

    def check_model(self, asked: str | None) -> None:
        """Raises ApiError 404 for a model that is not served."""
        if asked is not None and asked != self.model_name:
            raise ApiError(
                404,
                f"the model {asked[:200]!r} is not served here; served: {self.model_name!r}",
                code="model_not_found",
                param="model",
                fixes=("GET /v1/models",),
            )


def build_context(settings: ServerSettings, model_name: str, build: Callable[[EventHub], Parts]) -> ServerContext:
    """Make the parts of a server around an engine; the engine's thread is not started. build: makes the engine, whose
    cache tells the hub its events. Raises InvalidRequest for a bad file of API keys, before the model is loaded."""
    tenants = load_tenants(settings.api_keys, settings.share_prefixes) if settings.api_keys else Tenants()
    events = EventHub()
    parts = build(events)
    metrics = Metrics(parts.engine, settings.metrics_prefix, model_name)
    thread = EngineThread(parts.engine, (metrics, events))
    return ServerContext(
        settings=settings,
        model_name=model_name,
        tokenizer=parts.tokenizer,
        vocab_size=parts.model.vocab_size,
        plan=parts.plan,
        most_tokens=most_tokens(parts.engine, parts.plan),
        thread=thread,
        desk=Desk(thread, settings, parts.plan.max_seqs),
        tenants=tenants,
        metrics=metrics,
        events=events,
        guides=GuideMaker(parts.tokenizer, parts.model.vocab_size),
        policy=parts.engine.policy,
    )


def most_tokens(engine: Engine, plan: CachePlan) -> int:
    """The longest prompt and answer together that an empty cache takes; the last token needs no slot."""
    low, high = 1, plan.context_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if engine.cache.never_fits(middle - 1) is None else (low, middle - 1)
    return low
