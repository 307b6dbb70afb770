"""Random numbers that depend on (seed, completion, position) and on nothing else: not on the batch, not on how often a
step was repeated. Philox is a counter-based generator (Salmon et al. 2011), so any position is reached at once."""

from __future__ import annotations

import secrets

import numpy as np

MASK = 2**64 - 1


def fresh_seed() -> int:
    """A seed for a request that states none."""
    return secrets.randbits(64)


def uniform(seed: int, completion: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` of a request's completion."""
    key = (seed & MASK) | ((completion & MASK) << 64)
    return float(np.random.Generator(np.random.Philox(counter=position, key=key)).random())
