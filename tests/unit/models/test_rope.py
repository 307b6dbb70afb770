"""Every rope scaling against the tables that transformers makes for the same config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from kvarn.core.errors import ConfigError
from kvarn.kernels.reference import BACKEND
from kvarn.models.rope import rope_parameters, rotary_embedding

HEAD_DIM = 64
BASE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": HEAD_DIM,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "vocab_size": 32,
    "pad_token_id": 0,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, betas": {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 512,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.9,
        "mscale_all_dim": 0.4,
        "original_max_position_embeddings": 1024,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 1024,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 1024,
    },
}
POSITIONS = torch.tensor([0, 1, 2, 17, 511, 512, 1023, 1024, 4095])


def theirs(module: Any, positions: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = module(torch.zeros(1, 1), positions[None], **kwargs)
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("vocabulary", ["rope_parameters", "rope_scaling"])
def test_equals_transformers(name: str, vocabulary: str) -> None:
    scaling = SCALINGS[name]
    config = LlamaConfig(**BASE, rope_parameters={"rope_theta": 5e4, **scaling})
    ours = (
        {**BASE, "rope_parameters": {"rope_theta": 5e4, **scaling}}
        if vocabulary == "rope_parameters"
        else {
            **BASE,
            "rope_theta": 5e4,
            "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in scaling.items()},
        }
    )
    rope = rotary_embedding(ours, HEAD_DIM)(POSITIONS)
    cos, sin = theirs(LlamaRotaryEmbedding(config), POSITIONS)
    if name == "partial":  # Llama's own module knows no partial rotation, Phi 3's does
        phi = Phi3Config(
            **{k: v for k, v in BASE.items() if k != "head_dim"}, rope_parameters={"rope_theta": 5e4, **scaling}
        )
        cos, sin = theirs(Phi3RotaryEmbedding(phi), POSITIONS)
    assert rope.cos.shape == cos.shape
    torch.testing.assert_close(rope.cos, cos, atol=2e-4, rtol=0)
    torch.testing.assert_close(rope.sin, sin, atol=2e-4, rtol=0)


@pytest.mark.parametrize("length", [100, 1024, 1025, 3000])
def test_dynamic_ntk_goes_by_the_length(length: int) -> None:
    settings = {**BASE, "max_position_embeddings": 1024}
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    positions = torch.arange(length)
    ours = rotary_embedding({**settings, "rope_parameters": parameters}, HEAD_DIM)
    rope = ours(positions, torch.full((length,), length))
    cos, sin = theirs(LlamaRotaryEmbedding(LlamaConfig(**settings, rope_parameters=parameters)), positions)
    torch.testing.assert_close(rope.cos, cos, atol=1e-3, rtol=0)
    torch.testing.assert_close(rope.sin, sin, atol=1e-3, rtol=0)
    assert ours.by_length


@pytest.mark.parametrize("length", [60, 256, 257, 900])
@pytest.mark.parametrize("attention_factor", [None, 1.3])
def test_longrope_goes_by_the_length(length: int, attention_factor: float | None) -> None:
    short = [1.0 + 0.05 * i for i in range(HEAD_DIM // 2)]
    long = [1.0 + 2.0 * i for i in range(HEAD_DIM // 2)]
    settings = {**BASE, "original_max_position_embeddings": 256}
    parameters: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": short,
        "long_factor": long,
    }
    if attention_factor:
        parameters["attention_factor"] = attention_factor
    settings.pop("head_dim")
    positions = torch.arange(length)
    ours = rotary_embedding({**settings, "rope_parameters": dict(parameters)}, HEAD_DIM)
    rope = ours(positions, torch.full((length,), length))
    cos, sin = theirs(Phi3RotaryEmbedding(Phi3Config(**settings, rope_parameters=parameters)), positions)
    torch.testing.assert_close(rope.cos, cos, atol=1e-4, rtol=0)
    torch.testing.assert_close(rope.sin, sin, atol=1e-4, rtol=0)


def test_rows_of_one_step_may_have_different_lengths() -> None:
    """A long request beside a short one changes nothing for the short one."""
    ours = rotary_embedding(
        {**BASE, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, HEAD_DIM
    )
    positions = torch.tensor([5, 5])
    both = ours(positions, torch.tensor([10, 20_000]))
    alone = ours(positions[:1], torch.tensor([10]))
    assert torch.equal(both.cos[:1], alone.cos)
    assert not torch.equal(both.cos[1], both.cos[0])


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("old", [False, True])
def test_gemma3_has_two_bases(layer_type: str, old: bool) -> None:
    shared = {**BASE, "num_hidden_layers": 6}
    scaling = {"rope_type": "linear", "factor": 8.0}
    parameters = {
        "full_attention": {**scaling, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    ours: dict[str, Any] = (
        {**shared, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling}
        if old
        else {**shared, "rope_parameters": parameters}
    )
    rope = rotary_embedding(ours, HEAD_DIM, layer_type)(POSITIONS)
    module = Gemma3RotaryEmbedding(Gemma3TextConfig(**shared, rope_parameters=parameters))
    cos, sin = theirs(module, POSITIONS, layer_type=layer_type)
    torch.testing.assert_close(rope.cos, cos, atol=1e-4, rtol=0)
    torch.testing.assert_close(rope.sin, sin, atol=1e-4, rtol=0)


def test_rotation_turns_halves() -> None:
    """A rotation by the table keeps lengths, and q.k depends on the distance alone."""
    rope = rotary_embedding({**BASE, "rope_theta": 1e4}, HEAD_DIM)
    q, k = torch.randn(2, 1, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float32)

    def score(at: int, key_at: int) -> float:
        turned_q = BACKEND().rope(q, rope(torch.tensor([at])))
        turned_k = BACKEND().rope(k, rope(torch.tensor([key_at])))
        return float((turned_q * turned_k).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-3)
    assert score(7, 3) != pytest.approx(score(9, 3), abs=1e-3)


def test_the_newer_vocabulary_wins() -> None:
    config = {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0, "rope_type": "default"}}
    assert rope_parameters(config)["rope_theta"] == 2.0


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor"),
    ],
)
def test_a_wrong_scaling_is_named(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        rotary_embedding({**BASE, "rope_parameters": parameters}, HEAD_DIM)
