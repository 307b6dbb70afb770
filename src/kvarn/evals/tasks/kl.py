"""Distance from the full cache in full precision, token by token of the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvarn.evals.scoring import LOGIT_ROWS
from kvarn.evals.tasks._windows import windows
from kvarn.evals.tasks.base import Bench, Settings, Task, Value


@dataclass(frozen=True)
class Divergence(Task):
    """KL(full || choice) in nats a token over the whole vocabulary, how often both have the same likeliest token, and
    the first token of a window where they differ (the number of scored tokens where they never do). Teacher-forced:
    both see the text's own tokens."""

    shown: ClassVar[tuple[str, ...]] = ("kl", "top1_agreement")
    reads: ClassVar[tuple[str, ...]] = ("text", "context_tokens", "stride_tokens", "windows")

    def context_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return settings.context_tokens + 1

    def cost_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return 2 * settings.windows * settings.context_tokens

    def run(self, bench: Bench, settings: Settings) -> Sequence[Value]:
        kls: list[Tensor] = []
        same: list[Tensor] = []
        firsts: list[int] = []
        for prompt, scored in windows(bench.tokenizer, settings):
            kl, agrees = compare(bench, bench.full.hidden(prompt, scored), bench.scorer.hidden(prompt, scored))
            kls.append(kl)
            same.append(agrees)
            differs = torch.nonzero(~agrees)
            firsts.append(int(differs[0]) if len(differs) else len(scored))
        kl, agrees = torch.cat(kls), torch.cat(same)
        return [
            Value("kl", float(kl.mean()), len(kl)),
            Value("kl_p99", float(torch.quantile(kl, 0.99)), len(kl)),
            Value("top1_agreement", float(agrees.double().mean()), len(kl)),
            Value("first_divergence_tokens", sum(firsts) / len(firsts), len(firsts)),
        ]


def compare(bench: Bench, full: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """KL(full || other) [n] float64 and top-1 agreement [n] bool of two lines of hidden states [n, hidden]."""
    kls, same = [], []
    for a, b in zip(full.split(LOGIT_ROWS), other.split(LOGIT_ROWS), strict=True):
        p, q = bench.full.log_softmax(a).double(), bench.scorer.log_softmax(b).double()
        kls.append((p.exp() * (p - q)).sum(-1).clamp(min=0.0))
        same.append(p.argmax(-1) == q.argmax(-1))
    return torch.cat(kls), torch.cat(same)


TASK = Divergence()
