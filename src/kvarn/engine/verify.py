"""The oracle at run time: a share of the decode steps is computed again over a full cache, and compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.requests import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from kvarn.engine.engine import Engine

ROWS = 64  # logits at once


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """steps: decode steps compared. kl: mean of KL(full || used) in nats over the vocabulary; kl_max: the largest.
    top1_agreement: share of the steps in which both have the same likeliest token. All 0 before the first step."""

    steps: int = 0
    kl: float = 0.0
    kl_max: float = 0.0
    top1_agreement: float = 0.0


@dataclass(eq=False)
class Watched:
    """Hidden states of the chosen steps of one request's first answer, by the position that they predict from."""

    prompt_tokens: int
    share: float
    seed: int
    rows: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, start: int, hidden: Tensor) -> None:
        """Keep what was chosen. The choice hangs on seed and position, not on how steps are cut."""
        for at in range(max(0, self.prompt_tokens - start), len(hidden)):
            position = start + at
            if random.Random(f"{self.seed} {position}").random() < self.share:
                self.rows[position] = hidden[at].clone()


class Verifier:
    """Compares requests that ended, one at a time, over an engine of its own with a full cache in full precision. A
    comparison costs the prefill of the whole text. Raises IncompatiblePlan: a share outside (0, 1]."""

    def __init__(self, full: Engine, share: float) -> None:
        if not 0 < share <= 1:
            raise IncompatiblePlan(f"verify is {share:.6g}", fixes=("use a share in (0, 1]; 0 is off",))
        self._full, self._share, self._count = full, share, 0
        self._kl_sum, self._kl_max, self._agreed, self._steps = 0.0, 0.0, 0, 0

    def watch(self, prompt_ids: Sequence[int], seed: int) -> Watched:
        """What a request's decode steps are to be shown to."""
        return Watched(len(prompt_ids), self._share, seed)

    def settle(self, watched: Watched, output: RequestOutput) -> None:
        """Compare the steps that were kept. The last token of an answer was never fed, so nothing hangs on it."""
        if not watched.rows:
            return
        positions = sorted(watched.rows)
        fed = [*output.prompt_ids, *output.completions[0].token_ids][: positions[-1] + 1]
        full = self._hidden(fed, set(positions))
        for at in range(0, len(positions), ROWS):
            part = positions[at : at + ROWS]
            self._compare(torch.stack([full[p] for p in part]), torch.stack([watched.rows[p] for p in part]))

    def _hidden(self, ids: Sequence[int], wanted: set[int]) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}

        def watch(start: int, hidden: Tensor) -> None:
            for at, line in enumerate(hidden):
                if start + at in wanted:
                    found[start + at] = line.clone()

        self._count += 1
        self._full.add_request(f"verify-{self._count}", ids, SamplingParams(max_tokens=1), watch=watch)
        while self._full.has_work:
            self._full.step()
        return found

    def _compare(self, full: Tensor, used: Tensor) -> None:
        """Rows of hidden states [n, hidden]."""
        with torch.inference_mode():
            p, q = (torch.log_softmax(self._full.model.logits(h), dim=-1).double() for h in (full, used))
        kl = (p.exp() * (p - q)).sum(-1).clamp(min=0.0)
        self._steps += len(kl)
        self._kl_sum += float(kl.sum())
        self._kl_max = max(self._kl_max, float(kl.max()))
        self._agreed += int((p.argmax(-1) == q.argmax(-1)).sum())

    @property
    def report(self) -> VerifyReport:
        """Over all requests so far."""
        if not self._steps:
            return VerifyReport()
        return VerifyReport(self._steps, self._kl_sum / self._steps, self._kl_max, self._agreed / self._steps)
