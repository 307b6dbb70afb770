"""From what was asked to a running engine: model, plan, cache, scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch

from kvarn.core.events import EventSink
from kvarn.core.files import ModelFiles, fingerprint
from kvarn.core.options import CachePlan, EngineOptions
from kvarn.engine.engine import Cache, Engine
from kvarn.engine.scheduler import Scheduler, SchedulerConfig
from kvarn.kernels import load_backend
from kvarn.kernels.api import Backend
from kvarn.kv.manager import CacheManager
from kvarn.kv.recompute import RecomputeCache
from kvarn.kv.sizing import plan_cache
from kvarn.models.base import CausalLM
from kvarn.models.loading import load_model
from kvarn.text import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of."""

    model: CausalLM
    tokenizer: Tokenizer
    plan: CachePlan
    engine: Engine


def build_engine(files: ModelFiles, options: EngineOptions, emit: EventSink | None = None) -> Parts:
    """Load a model and put an engine around it. emit: is told what the cache does. Raises ModelError, DoesNotFit,
    IncompatiblePlan, UnknownName."""
    backend = load_backend(options.backend)
    if options.threads is not None and options.threads > 0:  # the plan refuses others
        torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(files)
    model = load_model(files, options.weights)
    return assemble(model, tokenizer, backend, options, emit, fingerprint=fingerprint(files.path))


def assemble(
    model: CausalLM,
    tokenizer: Tokenizer,
    backend: Backend,
    options: EngineOptions,
    emit: EventSink | None = None,
    *,
    fingerprint: str = "",
) -> Parts:
    """An engine around a model that is already loaded. fingerprint: identity of its weights."""
    plan = plan_cache(
        model.layers,
        options,
        max_context=model.max_context_tokens,
        default_format=str(model.activations).removeprefix("torch."),
        free_bytes=psutil.virtual_memory().available,
    )
    scheduler_config = SchedulerConfig(
        max_seqs=plan.max_seqs,
        step_tokens=plan.step_tokens,
        context_tokens=plan.context_tokens,
        recompute_all=plan.mode == "none",
    )
    model_id = f"{fingerprint} {options.weights} {backend.name}"
    shares = options.prefix_caching and not model.rope_by_length
    cache = _cache(plan, model, backend, options, emit, model_id if shares else None)
    engine = Engine(model, tokenizer, cache, Scheduler(scheduler_config, cache))
    return Parts(model, tokenizer, plan, engine)


def _cache(
    plan: CachePlan,
    model: CausalLM,
    backend: Backend,
    options: EngineOptions,
    emit: EventSink | None,
    model_id: str | None,
) -> Cache:
    if plan.mode == "none":
        return RecomputeCache(plan, model.layers, backend, poison=options.poison)
    return CacheManager(plan, model.layers, backend, poison=options.poison, emit=emit, model_id=model_id)


def with_overrides(options: EngineOptions | None, overrides: dict[str, object]) -> EngineOptions:
    """The options with some fields replaced by name. TypeError names an unknown one."""
    return replace(options or EngineOptions(), **overrides)  # pyright: ignore[reportArgumentType]
