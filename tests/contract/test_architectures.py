"""Every architecture file against transformers, over the reference kernels and a plain list of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kvarn.core.registry import names_in
from kvarn.models.base import ARCHITECTURES, CausalLM, load_architecture
from kvarn.models.loading import load_model
from support.list_of_blocks import BLOCK, ListOfBlocks, run

LENGTH = 37
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PHI_FACTORS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}
GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 97,
}
# Architecture -> variants of its config, each a real option of real models of that family.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "plain": {},
        "mha": {"num_key_value_heads": 4},
        "mqa": {"num_key_value_heads": 1},
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "wide heads": {"head_dim": 24},
        "llama3": {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        "dynamic": {
            "max_position_embeddings": 20,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
        "yarn": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    },
    "mistral": {"window": {"sliding_window": 7}, "no window": {"sliding_window": None}, "head dim": {"head_dim": 32}},
    "qwen2": {
        "plain": {},
        "window": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
        "layer types": {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "tied": {"tie_word_embeddings": True},
    },
    "qwen3": {
        "plain": {"head_dim": 32},
        "bias": {"head_dim": 32, "attention_bias": True},
        "window": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    },
    "gemma2": {
        "plain": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24},
        "tight caps": {
            "head_dim": 32,
            "sliding_window": 5,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 0.3,
        },
        "no caps": {
            "head_dim": 16,
            "sliding_window": 5,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    },
    "gemma3_text": {
        "plain": {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 7},
        "pattern": {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 30},
        "scaled": {
            "head_dim": 16,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 0.4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    },
    "gemma4_text": {
        "shared caches, own inputs": {
            **GEMMA4,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 16,
            "use_double_wide_mlp": True,
        },
        "k is v": {
            **GEMMA4,
            "hidden_size_per_layer_input": 8,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 2,
        },
        "no own inputs": {**GEMMA4, "hidden_size_per_layer_input": 0},
        "all its own": {**GEMMA4, "hidden_size_per_layer_input": 8, "final_logit_softcapping": 5.0},
    },
    "phi3": {
        "plain": {},
        "window": {"sliding_window": 9},
        "longrope, short": {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 40,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
                **PHI_FACTORS,
            },
        },
        "longrope, long": {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
                **PHI_FACTORS,
            },
        },
    },
}
EVERY_CASE = [(name, variant) for name in CASES for variant in CASES[name]]


@dataclass
class Pair:
    ours: CausalLM
    theirs: Any
    ids: Tensor
    expected: Tensor


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny random model of each case, saved by transformers and read by Kvarn; built once a module."""
    built: dict[tuple[str, str], Pair] = {}

    def get(name: str, variant: str) -> Pair:
        if (name, variant) not in built:
            built[name, variant] = make_pair(name, variant, tmp_path_factory.mktemp("model"))
        return built[name, variant]

    return get


def make_pair(name: str, variant: str, where: Path) -> Pair:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**TINY, **CASES[name][variant]})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in theirs.parameters():  # norms and biases that are not their start values; logits that differ
            parameter.add_(torch.randn_like(parameter) * 0.15)
    theirs.save_pretrained(where)
    ids = torch.randint(3, config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    return Pair(load_model(where, "float32"), theirs, ids, expected)


def test_every_architecture_has_cases() -> None:
    assert set(names_in(ARCHITECTURES)) == set(CASES)


@pytest.mark.parametrize(("name", "variant"), EVERY_CASE)
def test_whole_prefill_equals_transformers(name: str, variant: str, pairs: Any) -> None:
    pair = pairs(name, variant)
    logits = run(pair.ours, ListOfBlocks(pair.ours, 1, LENGTH), [(0, pair.ids)], {0: LENGTH})
    assert pair.expected.std() > 0.05  # a model that says something
    assert (logits - pair.expected).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "variant"), EVERY_CASE)
@pytest.mark.parametrize("chunks", [[1] * LENGTH, [3, 4, 5, 1, 11, 2, 11], [BLOCK] * 9 + [1]], ids=str)
def test_any_chunking_equals_whole_prefill(name: str, variant: str, chunks: list[int], pairs: Any) -> None:
    pair = pairs(name, variant)
    cache = ListOfBlocks(pair.ours, 1, LENGTH)
    pieces = [run(pair.ours, cache, [(0, ids)], {0: LENGTH}) for ids in pair.ids.split(chunks)]
    assert (torch.cat(pieces) - pair.expected).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "variant"), EVERY_CASE)
@pytest.mark.parametrize("cuts", [[1], [1, 2], [2]], ids=str)
def test_layers_in_parts_equal_the_whole(name: str, variant: str, cuts: list[int], pairs: Any) -> None:
    pair = pairs(name, variant)
    caches = ListOfBlocks(pair.ours, 1, LENGTH), ListOfBlocks(pair.ours, 1, LENGTH)
    for ids in pair.ids.split(LENGTH // 2):
        whole, parts = (
            run(pair.ours, c, [(0, ids)], {0: LENGTH}, at) for c, at in zip(caches, (None, cuts), strict=True)
        )
        assert torch.equal(whole, parts)


@pytest.mark.parametrize("name", sorted(CASES))
def test_alone_equals_in_a_batch_of_17(name: str, pairs: Any) -> None:
    pair = pairs(name, next(iter(CASES[name])))
    lengths = [BLOCK - 1, BLOCK, BLOCK + 1, 1, LENGTH, *(5 + i for i in range(12))]
    cache = ListOfBlocks(pair.ours, 17, LENGTH + 1)
    order = list(range(17))
    texts = [pair.ids.roll(-s)[:n] for s, n in enumerate(lengths)]
    first = run(pair.ours, cache, [(s, texts[s]) for s in order]).split(lengths)
    second = run(pair.ours, cache, [(s, texts[s][:1]) for s in reversed(order)])[list(reversed(order))]
    for s in order:
        alone = ListOfBlocks(pair.ours, 1, LENGTH + 1)
        assert (run(pair.ours, alone, [(0, texts[s])]) - first[s]).abs().max() < 1e-5
        assert (run(pair.ours, alone, [(0, texts[s][:1])]) - second[s]).abs().max() < 1e-5


@pytest.mark.parametrize(("name", "variant"), EVERY_CASE)
def test_greedy_continuation_equals_transformers(name: str, variant: str, pairs: Any) -> None:
    """16 tokens, each by recomputing everything in transformers: the cache is ours alone."""
    pair = pairs(name, variant)
    if pair.ours.rope_by_length:
        pytest.skip("transformers turns the whole sequence anew as it grows; Kvarn fixes its rotation at the start")
    cache, ids = ListOfBlocks(pair.ours, 1, 32), pair.ids[:16]
    logits = run(pair.ours, cache, [(0, ids)])
    for _ in range(15):
        with torch.inference_mode():
            expected = pair.theirs(ids[None]).logits[0, -1]
        token = logits[-1].argmax()
        assert token == expected.argmax()
        ids = torch.cat((ids, token[None]))
        logits = run(pair.ours, cache, [(0, token[None])])


@pytest.mark.parametrize(("name", "variant"), EVERY_CASE)
def test_rows_in_bfloat16_stay_near_float32(name: str, variant: str, pairs: Any, tmp_path: Path) -> None:
    pair = pairs(name, variant)
    pair.theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, "bfloat16")
    logits = run(ours, ListOfBlocks(ours, 1, LENGTH), [(0, pair.ids)], {0: LENGTH})
    assert logits.dtype == torch.float32
    assert (logits - pair.expected).abs().max() < 0.15 * pair.expected.abs().max()


@pytest.mark.parametrize("name", sorted(CASES))
def test_tensors_are_the_parameters(name: str, pairs: Any) -> None:
    """Every parameter of the checkpoint is held once, in float32; a tied embedding as a table and as a product."""
    pair = pairs(name, next(iter(CASES[name])))
    numbers = sum(p.numel() for p in pair.theirs.parameters())
    numbers += sum(b.numel() for name, b in pair.theirs.named_buffers() if name.endswith("layer_scalar"))
    tied = pair.theirs.model.embed_tokens.weight.numel() if pair.theirs.config.tie_word_embeddings else 0
    assert pair.ours.weight_bytes == 4 * (numbers + tied)


@pytest.mark.parametrize("name", sorted(CASES))
def test_file_name_is_the_model_type(name: str) -> None:
    assert load_architecture(name).__module__ == f"{ARCHITECTURES}.{name}"


@pytest.mark.parametrize(("name", "variant"), EVERY_CASE)
def test_layers_keep_what_transformers_keeps(name: str, variant: str, pairs: Any) -> None:
    """The specs that the planner counts and the cache allocates, against a cache that transformers has filled."""
    pair = pairs(name, variant)
    with torch.inference_mode():
        filled = pair.theirs(pair.ids[None], use_cache=True).past_key_values
    assert len(filled.layers) == len(pair.ours.layers)
    for spec, layer in zip(pair.ours.layers, filled.layers, strict=True):
        if spec.shares_layer is not None:
            assert getattr(layer, "keys", None) is None
            continue
        assert layer.keys.shape[1::2] == (spec.kv_heads, spec.k_dim)
        assert layer.values.shape[1::2] == (spec.kv_heads, spec.v_dim)
        assert getattr(layer, "sliding_window", None) == spec.window_tokens
    assert all(spec.query_heads == TINY["num_attention_heads"] for spec in pair.ours.layers)
