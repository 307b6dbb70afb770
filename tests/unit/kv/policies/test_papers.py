"""Kept sets against plain NumPy transcriptions of the papers' rules, on random tensors."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.kv.policies.adakv import AdaKV
from kvarn.kv.policies.base import Budget, KVPolicy
from kvarn.kv.policies.h2o import H2O
from kvarn.kv.policies.kvzip import KVzip
from kvarn.kv.policies.pyramidkv import PyramidKV
from kvarn.kv.policies.scissorhands import Scissorhands
from kvarn.kv.policies.snapkv import SnapKV
from kvarn.kv.policies.tova import TOVA
from support.policy_views import Numbers, kept_positions, random_view

SEEDS = range(6)
LENGTH, BUDGET = 40, 14


def decided(policy: KVPolicy, seed: int) -> tuple[list[set[int]], Numbers]:
    view, numbers = random_view(seed, policy.query_tokens, length=LENGTH)
    decision = policy.decide(view)
    assert decision is not None
    return kept_positions(view, decision.keep[0]), numbers


def best(scores: np.ndarray, among: list[int], n: int) -> set[int]:
    """The n positions of `among` with the highest scores."""
    return set(sorted(among, key=lambda i: -scores[i])[:n])


@pytest.mark.parametrize("seed", SEEDS)
def test_h2o(seed: int) -> None:
    """Algorithm 1: half the budget recent, half the largest accumulated weights of the rest."""
    kept, numbers = decided(H2O(Budget(tokens=BUDGET)), seed)
    for row, got in enumerate(kept):
        layer, head = divmod(row, 2)
        accumulated = np.zeros(LENGTH)
        for query in range(LENGTH):
            for member in range(3):
                accumulated += numbers.weights[layer, head, query, member]
        recent = set(range(LENGTH - BUDGET // 2, LENGTH))
        rest = [i for i in range(LENGTH) if i not in recent]
        assert got == recent | best(accumulated, rest, BUDGET - len(recent))


@pytest.mark.parametrize("seed", SEEDS)
def test_scissorhands(seed: int) -> None:
    """Algorithm 2: over the history window, count how often a token is below the average weight; most counts go."""
    window, recent_tokens = 8, 4
    policy = Scissorhands(Budget(tokens=BUDGET), recent=recent_tokens, query_tokens=window)
    kept, numbers = decided(policy, seed)
    for row, got in enumerate(kept):
        layer, head = divmod(row, 2)
        low, total = np.zeros(LENGTH), np.zeros(LENGTH)
        for query in range(LENGTH - window, LENGTH):
            for member in range(3):
                weights = numbers.weights[layer, head, query, member]
                low[: query + 1] += weights[: query + 1] < 1 / (query + 1)
                total += weights
        recent = set(range(LENGTH - recent_tokens, LENGTH))
        rest = sorted((i for i in range(LENGTH) if i not in recent), key=lambda i: (low[i], -total[i]))
        assert got == recent | set(rest[: BUDGET - recent_tokens])


def snap_scores(numbers: Numbers, row: int, window: int, pool: int) -> np.ndarray:
    """Votes of the observation window for the tokens before it, then a maximum over `pool` neighbours."""
    layer, head = divmod(row, 2)
    votes = numbers.weights[layer, head, -window:].sum((0, 1))[:-window]
    reach = pool // 2
    return np.array([votes[max(0, i - reach) : i + reach + 1].max() for i in range(len(votes))])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pool", [1, 5])
def test_snapkv(seed: int, pool: int) -> None:
    """Section 4 and listing 1."""
    window = 4
    kept, numbers = decided(SnapKV(Budget(tokens=BUDGET), query_tokens=window, pool=pool), seed)
    for row, got in enumerate(kept):
        scores = snap_scores(numbers, row, window, pool)
        order = np.argsort(-scores, kind="stable")
        chosen = set(order[: BUDGET - window].tolist())
        tied = scores[order[BUDGET - window - 1]]  # a maximum over neighbours makes ties; which of them stay is free
        sure = {int(i) for i in chosen if scores[i] > tied}
        assert sure <= got and len(got) == BUDGET and set(range(LENGTH - window, LENGTH)) <= got
        assert all(scores[i] >= tied for i in got if i < LENGTH - window)


@pytest.mark.parametrize("seed", SEEDS)
def test_tova(seed: int) -> None:
    """Section 3.2: the last query's weights, averaged over the layer's heads; all heads keep the same."""
    kept, numbers = decided(TOVA(Budget(tokens=BUDGET)), seed)
    for row, got in enumerate(kept):
        mean = numbers.weights[row // 2, :, -1].mean((0, 1))
        assert got == {LENGTH - 1} | best(mean, list(range(LENGTH - 1)), BUDGET - 1)
    assert kept[0] == kept[1] and kept[2] == kept[3]


@pytest.mark.parametrize("seed", SEEDS)
def test_pyramidkv(seed: int) -> None:
    """Section 4.2: the last of m layers gets k / beta, the first 2k - k / beta, in equal steps between them."""
    window, beta, layers = 4, 3.0, 4
    policy = PyramidKV(Budget(tokens=BUDGET), query_tokens=window, pool=1, beta=beta)
    view, numbers = random_view(seed, window, layers=layers, length=LENGTH)
    decision = policy.decide(view)
    assert decision is not None
    kept = kept_positions(view, decision.keep[0])
    last = BUDGET / beta
    first = 2 * BUDGET - last
    step = (first - last) / (layers - 1)
    for row, got in enumerate(kept):
        budget = first - step * (row // 2)
        assert abs(len(got) - budget) <= 1  # whole tokens
        scores = snap_scores(numbers, row, window, 1)
        assert got == set(range(LENGTH - window, LENGTH)) | best(scores, list(range(36)), len(got) - window)
    assert sum(map(len, kept)) == BUDGET * len(kept)


@pytest.mark.parametrize("seed", SEEDS)
def test_adakv(seed: int) -> None:
    """Algorithm 1: the layer's highest scores decide how much each head gets, beside an even floor."""
    window, floor = 4, 0.25
    kept, numbers = decided(AdaKV(Budget(tokens=BUDGET), query_tokens=window, pool=1, floor=floor), seed)
    for layer in range(2):
        scores = [snap_scores(numbers, layer * 2 + head, window, 1) for head in range(2)]
        spare = 2 * (BUDGET - window)
        even = int(spare * floor / 2)
        ranked = sorted(((s, head) for head in range(2) for s in scores[head]), reverse=True)[: spare - 2 * even]
        for head in range(2):
            n = window + even + sum(h == head for _, h in ranked)
            expected = set(range(LENGTH - window, LENGTH)) | best(scores[head], list(range(36)), n - window)
            assert kept[layer * 2 + head] == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_kvzip(seed: int) -> None:
    """Section 3: the largest weight over repeated tokens and query heads; the best over all heads and layers stay. What
    came after the repeated text stays before all of it."""
    later = 3
    view, numbers = random_view(seed, later, length=LENGTH)
    decision = KVzip(Budget(tokens=BUDGET), sinks=2).decide(view)
    assert decision is not None
    scored = []
    for row in range(4):
        layer, head = divmod(row, 2)
        for key in range(LENGTH):
            weight = max(numbers.weights[layer, head, query, m, key] for query in range(LENGTH) for m in range(3))
            scored.append((3 if key < 2 else 2 if key >= LENGTH - later else weight, row, key))
    expected: list[set[int]] = [set() for _ in range(4)]
    for _, row, key in sorted(scored, reverse=True)[: 4 * BUDGET]:
        expected[row].add(key)
    got = kept_positions(view, decision.keep[0])
    assert got == expected
    assert len({len(kept) for kept in got}) > 1
