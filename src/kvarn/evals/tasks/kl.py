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
    both see the text's own tokens.

    `rise_nats`: how much more the text surprises the choice than the full cache, nats a token; `rise_nats_error`: its
    standard error. Both read the same tokens, so their difference is known better than either's perplexity."""

    shown: ClassVar[tuple[str, ...]] = ("kl", "top1_agreement")
    reads: ClassVar[tuple[str, ...]] = ("text", "context_tokens", "stride_tokens", "windows")
    version: ClassVar[int] = 2

    def context_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return settings.context_tokens + 1

    def cost_tokens(self, settings: Settings, trained_tokens: int) -> int:
        return 2 * settings.windows * settings.context_tokens

    def run(self, bench: Bench, settings: Settings) -> Sequence[Value]:
        kls: list[Tensor] = []
        same: list[Tensor] = []
        rises: list[Tensor] = []
        firsts: list[int] = []
        for prompt, scored in windows(bench.tokenizer, settings):
            hidden = bench.full.hidden(prompt, scored), bench.scorer.hidden(prompt, scored)
            kl, agrees, rise = compare(bench, *hidden, torch.tensor(scored))
            kls.append(kl)
            same.append(agrees)
            rises.append(rise)
            differs = torch.nonzero(~agrees)
            firsts.append(int(differs[0]) if len(differs) else len(scored))
        kl, agrees, rise = torch.cat(kls), torch.cat(same), torch.cat(rises)
        return [
            Value("kl", float(kl.mean()), len(kl), samples=means(kls)),
            Value("kl_p99", float(torch.quantile(kl, 0.99)), len(kl)),
            Value("top1_agreement", float(agrees.double().mean()), len(kl), samples=means(same)),
            Value("first_divergence_tokens", sum(firsts) / len(firsts), len(firsts)),
            Value("rise_nats", float(rise.mean()), len(rise), samples=means(rises)),
            Value("rise_nats_error", standard_error(rises), len(rise)),
        ]


def compare(bench: Bench, full: Tensor, other: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(full || other) [n] float64, top-1 agreement [n] bool, and by how many nats `other` finds each of the targets
    [n] less likely, of two lines of hidden states [n, hidden]."""
    kls, same, rises = [], [], []
    parts = zip(full.split(LOGIT_ROWS), other.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
    for a, b, wanted in parts:
        p, q = bench.full.log_softmax(a).double(), bench.scorer.log_softmax(b).double()
        kls.append((p.exp() * (p - q)).sum(-1).clamp(min=0.0))
        same.append(p.argmax(-1) == q.argmax(-1))
        rises.append((p - q).gather(1, wanted[:, None])[:, 0])
    return torch.cat(kls), torch.cat(same), torch.cat(rises)


def means(windows: Sequence[Tensor]) -> list[float]:
    return [float(w.double().mean()) for w in windows]


def standard_error(windows: Sequence[Tensor]) -> float:
    """Of the mean over all tokens. Tokens of one window hang together, so windows count as the samples; the tokens do
    where there is one window only."""
    samples = torch.stack([w.mean() for w in windows]) if len(windows) > 1 else windows[0]
    return float(samples.std() / len(samples) ** 0.5) if len(samples) > 1 else 0.0


TASK = Divergence()
