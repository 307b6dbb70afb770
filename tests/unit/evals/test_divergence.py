"""The distance between two caches, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from kvarn.evals.scoring import Scorer
from kvarn.evals.tasks._windows import windows
from kvarn.evals.tasks.base import Bench, Settings
from kvarn.evals.tasks.kl import TASK, standard_error
from kvarn.evals.texts import shipped_text
from support.engines import make_engine
from support.models import byte_tokenizer

SETTINGS = Settings(text=shipped_text("alice.txt")[:600], context_tokens=64, stride_tokens=24, windows=3)


def test_the_rise_is_the_difference_of_the_log_likelihoods() -> None:
    tokenizer = byte_tokenizer()
    full, few = (Scorer(make_engine(kv=kv, block_size=8)) for kv in ("full", "window:16"))
    values = {v.metric: v.value for v in TASK.run(Bench(few, full, tokenizer, 96, drops=True), SETTINGS)}
    rises = [
        full.score(prompt, scored).logprobs - few.score(prompt, scored).logprobs
        for prompt, scored in windows(tokenizer, SETTINGS)
    ]
    assert values["rise_nats"] == pytest.approx(float(torch.cat(rises).mean()), abs=1e-6)
    means = torch.stack([r.mean() for r in rises])
    assert values["rise_nats_error"] == pytest.approx(float(means.std()) / math.sqrt(3), abs=1e-6)


def test_the_error_of_one_window_comes_from_its_tokens() -> None:
    assert standard_error([torch.tensor([1.0, 3.0])]) == pytest.approx(math.sqrt(2) / math.sqrt(2))
    assert standard_error([torch.tensor([1.0])]) == 0.0
