"""From what was asked to a running engine: model, plan, cache, scheduler."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from kvarn.core.cache_params import CacheParams
from kvarn.core.errors import ConfigError, DoesNotFit, IncompatiblePlan, InvalidRequest, ModelError
from kvarn.core.events import EventSink
from kvarn.core.files import ModelFiles, fingerprint
from kvarn.core.geometry import geometry_of
from kvarn.core.options import CachePlan, EngineOptions
from kvarn.core.specs import LayerSpec, share_layers
from kvarn.engine.computing import Cache
from kvarn.engine.engine import Engine
from kvarn.engine.pacing import Pace
from kvarn.engine.scheduler import Scheduler
from kvarn.engine.step_plan import SchedulerConfig
from kvarn.engine.verify import Verifier
from kvarn.kernels import load_backend
from kvarn.kernels.api import Backend
from kvarn.kv.choice import check_context, parse_choice, policy_of, settled
from kvarn.kv.governing import check_policy
from kvarn.kv.manager import CacheManager
from kvarn.kv.recompute import RecomputeCache
from kvarn.kv.settling import policy_for
from kvarn.kv.sizing import plan_cache
from kvarn.models.base import CausalLM
from kvarn.models.config import text_config
from kvarn.models.loading import load_model
from kvarn.models.loading.load import load_kind, read_config
from kvarn.text import Tokenizer, load_tokenizer

log = logging.getLogger("kvarn.engine")

# A step with prompt tokens may take three times what its decoding rows take alone; aimed at less, since steps vary.
MOST_SLOWDOWN = 1.9
# Of short prompts: a row that decodes costs about what two of a prompt cost.
BESIDE_DECODES_TOKENS = 32
PREFILL_PER_DECODE = 2
THREADS_A_CORE = 4  # at most; more than one gains nothing


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
    options = settled(options)
    backend = load_backend(options.backend)
    check_before_loading(files, options)
    _set_threads(options.threads)
    tokenizer = load_tokenizer(files)
    model = load_model(files, options.weights, options.share_layers, options.numerics, options.fast_memory_bytes)
    return assemble(model, tokenizer, backend, options, emit, fingerprint=fingerprint(files.path))


def _set_threads(threads: int | None) -> None:
    """Raises InvalidRequest for more threads than can be useful: they would wait for each other without end."""
    if threads is None or threads < 1:  # the plan refuses the latter
        return
    cores = os.cpu_count() or 1
    if threads > THREADS_A_CORE * cores:
        raise InvalidRequest(f"{threads} threads on {cores} cores", fixes=(f"--threads {cores}",))
    torch.set_num_threads(threads)


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
    options = settled(options)
    plan = _plan(model.layers, model.max_context_tokens, model.activations, options)
    _check_choices(options, plan)
    _warn_of_context(plan.context_tokens, model.max_context_tokens)
    scheduler_config = SchedulerConfig(
        max_seqs=plan.max_seqs,
        step_tokens=plan.step_tokens,
        context_tokens=plan.context_tokens,
        beside_decodes_tokens=None if plan.mode == "none" else BESIDE_DECODES_TOKENS,
        prefill_per_decode=PREFILL_PER_DECODE,
        model_layers=0 if plan.mode == "none" else len(model.layers),
        recompute_all=plan.mode == "none",
    )
    numbers = f"{options.weights} {options.numerics} {backend.name}"
    model_id = f"{fingerprint} {numbers} share_layers={options.share_layers}"
    shares = options.prefix_caching and not model.rope_by_length and not _residual_is_lossy(plan)
    cache = _cache(plan, model, backend, options, emit, model_id if shares else None)
    policy = policy_of(CacheParams(policy=options.policy))
    verifier = _verifier(model, tokenizer, backend, options, plan)
    engine = Engine(
        model,
        tokenizer,
        cache,
        Scheduler(scheduler_config, cache, Pace(MOST_SLOWDOWN)),
        policy=policy,
        verifier=verifier,
    )
    return Parts(model, tokenizer, plan, engine)


def _warn_of_context(context_tokens: int, own_tokens: int | None) -> None:
    """A longer context than the model was made for is allowed, and worth a line."""
    if own_tokens is not None and context_tokens > own_tokens:
        log.warning(
            "a context of %d tokens is longer than the %d that the model was made for: answers may get worse there",
            context_tokens,
            own_tokens,
        )


def _verifier(
    model: CausalLM, tokenizer: Tokenizer, backend: Backend, options: EngineOptions, plan: CachePlan
) -> Verifier | None:
    """Beside the engine, one with a full cache for one sequence of the longest context."""
    if not options.verify:
        return None
    asked = EngineOptions(
        weights=options.weights,
        numerics=options.numerics,
        backend=options.backend,
        share_layers=options.share_layers,
        block_size=options.block_size,
        context_tokens=plan.context_tokens + 1,  # the oracle generates one token, which nobody reads
        max_seqs=1,
        prefix_caching=False,
    )
    return Verifier(assemble(model, tokenizer, backend, asked).engine, options.verify)


def _residual_is_lossy(plan: CachePlan) -> bool:
    """A residual makes what a query reads of a block depend on how far behind it the block lies, so a sequence that
    takes sealed blocks over would read others than one that computes them: such prefixes are not shared."""
    return plan.residual_tokens > 0 and any(group.home > 0 for group in plan.groups)


def check_before_loading(files: ModelFiles, options: EngineOptions) -> None:
    """What the config alone shows to be impossible is refused before weights are read. options: settled. Raises
    IncompatiblePlan, DoesNotFit, UnknownName; a config that cannot be read is left to the loader."""
    if options.fast_memory_bytes is not None and options.numerics != "fast":
        raise IncompatiblePlan(
            f"{options.fast_memory_bytes:,} B for second forms of weights, which --numerics {options.numerics} has not",
            fixes=("--numerics fast", "leave --fast-memory out"),
        )
    try:
        geometry = geometry_of(dict(text_config(read_config(files.path))))
    except (ModelError, ConfigError):
        return
    layers = share_layers(geometry.layers, options.share_layers)
    plan = _plan(layers, geometry.max_context, load_kind(options.weights, options.numerics).activations, options)
    _check_choices(options, plan)


def _plan(
    layers: Sequence[LayerSpec], max_context: int | None, activations: torch.dtype, options: EngineOptions
) -> CachePlan:
    memory = psutil.virtual_memory()
    if options.kv_memory_bytes is not None and options.kv_memory_bytes > memory.total:
        raise DoesNotFit(
            f"{options.kv_memory_bytes:,} B of KV cache; this machine has {memory.total:,} B of memory, "
            f"{memory.available:,} B of it free",
            fixes=(f"--kv-memory {memory.available // 2**20}MiB at most", "leave it out"),
        )
    return plan_cache(
        layers,
        options,
        max_context=max_context,
        default_format=str(activations).removeprefix("torch."),
        free_bytes=memory.available,
    )


def _check_choices(options: EngineOptions, plan: CachePlan) -> None:
    """Every choice of cache that may be asked for can be had. Raises IncompatiblePlan."""
    for choice in (CacheParams(policy=options.policy), *map(parse_choice, options.also)):
        check_context(choice, plan.context_tokens)
        if (policy := policy_for(choice, plan, None)) is not None:
            check_policy(policy, plan)


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
    return CacheManager(
        plan, model.layers, backend, poison=options.poison, emit=emit, model_id=model_id, turns=model.turns
    )


def with_overrides(options: EngineOptions | None, overrides: dict[str, object]) -> EngineOptions:
    """The options with some fields replaced by name. TypeError names an unknown one."""
    return replace(options or EngineOptions(), **overrides)  # pyright: ignore[reportArgumentType]
