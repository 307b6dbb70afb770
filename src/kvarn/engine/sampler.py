"""From logits to tokens: penalties and bias, filters, one draw a row. Rows do not see each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.core.requests import SamplingParams, TokenLogprob
from kvarn.engine.randomness import uniform

FIRST_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What choosing one token needs to know. prompt and output: token -> occurrences; allowed: a mask [V] bool of the
    tokens that may come next, None for all."""

    params: SamplingParams
    seed: int
    completion: int
    position: int
    prompt: Mapping[int, int]
    output: Mapping[int, int]
    allowed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """logits [R, V] float32, not kept. One token a row; log-probabilities are of the model's own distribution."""
    plain = logits.numpy().argmax(axis=-1).tolist() if len(rows) else []  # several times as fast as torch's
    result = []
    for index, row in enumerate(rows):
        token = plain[index] if _is_plain_greedy(row) else _choose(logits[index], row)
        wanted = row.params.logprobs
        result.append(Sampled(token, None if wanted is None else token_logprob(logits[index], token, wanted)))
    return result


def token_logprob(logits: Tensor, token_id: int, top: int) -> TokenLogprob:
    """The token's log-probability and rank (1: the likeliest) among logits [V], and the `top` likeliest tokens."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs[token_id]
    rank = int((logprobs > own).sum()) + 1
    best: tuple[tuple[int, float], ...] = ()
    if top:
        values, ids = torch.topk(logprobs, min(top, logprobs.numel()))
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(own), rank, best)


def _is_plain_greedy(row: SampleRow) -> bool:
    return row.params.temperature == 0 and row.allowed is None and not _changes_logits(row.params)


def _changes_logits(p: SamplingParams) -> bool:
    return bool(p.logit_bias or p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty)


def _choose(logits: Tensor, row: SampleRow) -> int:
    """One row's token, from its own copy of logits [V]."""
    p = row.params
    if _changes_logits(p) or row.allowed is not None:
        logits = _adjusted(logits.clone(), row)
    if p.temperature == 0:
        return int(torch.argmax(logits))
    # From the best one down, so that dividing by hardly any temperature leaves the best one alone.
    ids, weights = _candidates((logits.double() - logits.max()) / p.temperature, p)
    cumulative = torch.cumsum(weights, dim=0)
    target = uniform(row.seed, row.completion, row.position) * float(cumulative[-1])
    return int(ids[min(int(torch.searchsorted(cumulative, target, right=True)), len(ids) - 1)])


def _adjusted(logits: Tensor, row: SampleRow) -> Tensor:
    """Penalties, bias and constraints, in place. Repetition: CTRL (Keskar et al. 2019), section 4.1."""
    p = row.params
    if p.repetition_penalty != 1 and (seen := {**row.prompt, **row.output}):
        at = torch.tensor(list(seen))
        old = logits[at]
        logits[at] = torch.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and row.output:
        at = torch.tensor(list(row.output))
        times = torch.tensor(list(row.output.values()), dtype=logits.dtype)
        logits[at] -= p.presence_penalty + p.frequency_penalty * times
    for token, bias in p.logit_bias.items():
        if token < logits.numel():
            logits[token] += bias
    if row.allowed is not None:
        logits.masked_fill_(~row.allowed, -torch.inf)
    return logits


def _candidates(scaled: Tensor, p: SamplingParams) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn and their weights (not normalised), by descending weight where anything was cut.
    top_k, then top_p of what is left, then min_p against the likeliest."""
    probabilities = torch.softmax(scaled, dim=-1)
    if not (p.top_k or p.top_p < 1 or p.min_p > 0):
        return torch.arange(len(scaled)), probabilities
    enough = _enough_for(p)
    size = len(scaled)
    count = min(p.top_k, size) if p.top_k else min(FIRST_CANDIDATES, size)
    while True:
        weights, ids = torch.topk(probabilities, count)
        if p.top_k or count == size or enough(weights):
            break
        count = min(count * 16, size)
    if p.top_p < 1:
        before = torch.cumsum(weights, dim=0) - weights
        keep = before < p.top_p * (float(weights.sum()) if p.top_k else 1.0)
        weights, ids = weights[keep], ids[keep]
    if p.min_p > 0:
        keep = weights >= p.min_p * weights[0]
        weights, ids = weights[keep], ids[keep]
    return ids, weights


def _enough_for(p: SamplingParams) -> Callable[[Tensor], bool]:
    """Whether descending weights hold all that the filters can leave."""

    def enough(weights: Tensor) -> bool:
        nucleus = p.top_p < 1 and float(weights.sum()) >= p.top_p
        relative = p.min_p > 0 and float(weights[-1]) < p.min_p * float(weights[0])
        return nucleus or relative

    return enough
