"""The plan is the allocation: over every architecture and KV format there is, the bytes that the planner plans are the
bytes of the tensors that the engine allocates, and both count from the same layer specs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvarn.core.formats import format_names
from kvarn.core.geometry import geometry_of
from kvarn.core.options import CachePlan, EngineOptions
from kvarn.core.registry import names_in
from kvarn.engine.build import assemble
from kvarn.kernels import load_backend
from kvarn.kv.pool import BlockPool
from kvarn.kv.storage import PoolStorage
from kvarn.models.base import ARCHITECTURES, CausalLM
from kvarn.models.loading.load import build_model, load_kind
from kvarn.planner.compute import build_case, make_plan
from kvarn.planner.engines import load_engine
from kvarn.planner.profiles.kvarn import KvarnCache
from kvarn.planner.settings import Settings
from support.models import BASE, byte_tokenizer, random_source

CONTEXT, ROOM = 256, 3_000_000


def config_of(model_type: str) -> dict[str, Any]:
    """A small config with every kind of layer that the architecture may have."""
    config = {**BASE, "model_type": model_type, "num_hidden_layers": 4, "head_dim": 8, "pad_token_id": 0}
    if model_type.startswith("gemma"):
        config |= {
            "sliding_window": 40,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
    if model_type == "mistral":
        config |= {"sliding_window": 40}
    return config


def model_of(config: dict[str, Any]) -> CausalLM:
    return build_model(config, random_source(config), load_kind("float32"))


def planned(config: dict[str, Any], kv: str) -> CachePlan:
    """What the planner says the engine will allocate."""
    geometry = geometry_of(config | {"torch_dtype": "float32"})
    asked = Settings(
        context_tokens=CONTEXT, sequences=3, slots=3, kv_k=kv, kv_v=kv, block_size=16, kv_memory_bytes=ROOM
    )
    case = build_case(geometry, load_engine("kvarn")[0], asked)
    cache = case.stages[0]
    assert isinstance(cache, KvarnCache)
    found = cache.cache_plan(ROOM)
    assert found is not None
    assert f"KV pools: {found.nbytes:,} B" in make_plan(case, None).lines
    return found


@pytest.mark.parametrize("kv", format_names())
@pytest.mark.parametrize("model_type", names_in(ARCHITECTURES))
def test_planned_bytes_are_allocated_bytes(model_type: str, kv: str) -> None:
    config = config_of(model_type)
    plan = planned(config, kv)
    options = EngineOptions(
        weights="float32", kv=kv, block_size=16, kv_memory_bytes=ROOM, context_tokens=CONTEXT, max_seqs=3
    )
    parts = assemble(model_of(config), byte_tokenizer(), load_backend("reference"), options)
    assert parts.plan.groups == plan.groups
    allocated = 0
    for group in parts.plan.groups:
        for pool in group.pools:
            ledger = BlockPool(pool.n_blocks, plan.block_size)
            storage = PoolStorage(group, pool, ledger, torch.device("cpu"))
            assert storage.nbytes == pool.nbytes
            allocated += sum(t.untyped_storage().nbytes() for t in storage.tensors())
    assert allocated == plan.nbytes <= ROOM


@pytest.mark.parametrize("model_type", names_in(ARCHITECTURES))
def test_planner_and_engine_count_from_the_same_specs(model_type: str) -> None:
    config = config_of(model_type)
    assert geometry_of(config).layers == model_of(config).layers
