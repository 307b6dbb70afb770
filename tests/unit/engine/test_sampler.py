"""The sampler against a plain NumPy statement of each rule."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from kvarn.core.requests import SamplingParams
from kvarn.engine.randomness import uniform
from kvarn.engine.sampler import SampleRow, sample, token_logprob

VOCAB = 700  # more than the sampler looks at first
PROMPT, OUTPUT = Counter([1, 2, 2, 5, 690]), Counter([2, 7, 7, 7, 680])


def some_logits(seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def row(position: int = 0, *, allowed: torch.Tensor | None = None, completion: int = 0, **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**params), 11, completion, position, PROMPT, OUTPUT, allowed)


def adjusted(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Penalties and bias, one token after the other."""
    out = logits.astype(np.float64).copy()
    for token in {*PROMPT, *OUTPUT}:
        out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
    for token, times in OUTPUT.items():
        out[token] -= p.presence_penalty + p.frequency_penalty * times
    for token, bias in p.logit_bias.items():
        out[token] += bias
    return out


def distribution(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Probability of each token: temperature, then top_k, then top_p of what is left, then min_p."""
    scaled = adjusted(logits, p) / p.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    keep = order[: p.top_k or VOCAB]
    if p.top_p < 1:
        left = probabilities[keep] / probabilities[keep].sum()
        keep = keep[: int(np.searchsorted(np.cumsum(left), p.top_p)) + 1]
    keep = keep[probabilities[keep] >= p.min_p * probabilities[order[0]]]
    out = np.zeros(VOCAB)
    out[keep] = probabilities[keep] / probabilities[keep].sum()
    return out


FILTERS = [
    {},
    {"temperature": 0.4},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 400},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 0.99, "temperature": 6.0},  # more tokens than the first look
    {"min_p": 0.1},
    {"min_p": 0.0001, "temperature": 5.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "top_k": 40},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"presence_penalty": -2.0, "frequency_penalty": -1.0, "top_p": 0.9},
    {"logit_bias": {3: 9.0, 4: -100.0}, "top_p": 0.9},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_distribution(filters: dict[str, Any]) -> None:
    """Every token that is drawn may be drawn, and the frequencies are those of the plain statement."""
    params = {"temperature": 1.0, **filters}
    logits, draws = some_logits(), 1200
    exact = distribution(logits.numpy(), SamplingParams(**params))
    rows = [row(position, **params) for position in range(draws)]
    counts = np.bincount([s.token_id for s in sample(logits.expand(draws, -1), rows)], minlength=VOCAB)
    assert not counts[exact == 0].any()
    often = exact * draws >= 5
    assert often.any()
    deviation = np.abs(counts - exact * draws)[often] / np.sqrt(exact * draws * (1 - exact) + 1)[often]
    assert deviation.max() < 5


@pytest.mark.parametrize("filters", [f for f in FILTERS if "temperature" not in f], ids=str)
def test_greedy_takes_the_best_after_penalties(filters: dict[str, Any]) -> None:
    for seed in range(20):
        logits = some_logits(seed, 1.0)
        (got,) = sample(logits[None], [row(temperature=0.0, **filters)])
        assert got.token_id == adjusted(logits.numpy(), SamplingParams(**filters)).argmax()


def test_a_draw_is_the_inverse_of_the_distribution() -> None:
    logits = some_logits()
    cumulative = np.cumsum(distribution(logits.numpy(), SamplingParams(temperature=1.0)))
    for position in range(50):
        (got,) = sample(logits[None], [row(position, temperature=1.0)])
        assert got.token_id == np.searchsorted(cumulative, uniform(11, 0, position), side="right")


def test_rows_do_not_see_each_other() -> None:
    logits = torch.stack([some_logits(i) for i in range(6)])
    before = logits.clone()
    rows = [row(i, **{"temperature": 1.0, **FILTERS[2 * i]}, logprobs=i) for i in range(6)]
    together = sample(logits, rows)
    assert together == [sample(logits[i][None], [rows[i]])[0] for i in range(6)]
    assert together == sample(logits.flip(0), rows[::-1])[::-1]
    assert torch.equal(logits, before), "logits were changed in place"


def test_allowed_tokens_only() -> None:
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[[3, 600]] = True
    logits = some_logits()
    (greedy,) = sample(logits[None], [row(allowed=allowed)])
    assert greedy.token_id == (3 if logits[3] > logits[600] else 600)
    drawn = {sample(logits[None], [row(i, allowed=allowed, temperature=2.0)])[0].token_id for i in range(40)}
    assert drawn == {3, 600}


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-9])
def test_hardly_any_temperature_is_greedy(temperature: float) -> None:
    logits = some_logits()
    (got,) = sample(logits[None], [row(temperature=temperature)])
    assert got.token_id == int(logits.argmax())


@pytest.mark.parametrize("bias", [1e9, -1e9])
def test_the_largest_bias(bias: float) -> None:
    logits = some_logits()
    for temperature in (0.0, 1.0):
        (got,) = sample(logits[None], [row(temperature=temperature, logit_bias={int(logits.argmax()): bias})])
        assert (got.token_id == int(logits.argmax())) == (bias > 0)


def test_logprobs_are_the_models_own() -> None:
    """Whatever the temperature, the filters and the penalties."""
    logits = some_logits()
    exact = logits.double().numpy() - np.log(np.exp(logits.double().numpy()).sum())
    params = {"temperature": 0.3, "top_k": 3, "logprobs": 4, "frequency_penalty": 2.0}
    (got,) = sample(logits[None], [row(**params)])
    found = got.logprob
    assert found is not None and found.token_id == got.token_id
    assert found.logprob == pytest.approx(exact[got.token_id], abs=1e-5)
    assert found.rank == 1 + int((exact > exact[got.token_id]).sum())
    best = np.argsort(-exact)[:4]
    assert [t for t, _ in found.top] == best.tolist()
    assert [p for _, p in found.top] == pytest.approx(exact[best].tolist(), abs=1e-5)


def test_only_the_sampled_ones_logprob() -> None:
    assert token_logprob(some_logits(), 3, 0).top == ()
    (without,) = sample(some_logits()[None], [row()])
    assert without.logprob is None


def test_random_numbers_depend_on_seed_completion_and_position() -> None:
    drawn = {(s, c, p): uniform(s, c, p) for s in (-1, 0, 1, 2**63, 2**64 - 2) for c in (0, 1) for p in (0, 1, 10**6)}
    assert len(set(drawn.values())) == len(drawn) and all(0 <= x < 1 for x in drawn.values())
    assert drawn == {key: uniform(*key) for key in reversed(drawn)}
    assert np.mean([uniform(5, 0, p) for p in range(2000)]) == pytest.approx(0.5, abs=0.03)
