"""Attention as the textbook has it, over a whole sequence at once: what the cache must not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.kernels.api import AttendParams, Rope
from kvarn.kernels.reference import BACKEND
from kvarn.kv.view import StepInputs
from kvarn.models.base import CausalLM

KERNELS = BACKEND()


@dataclass(frozen=True)
class DenseLayer:
    def append_and_attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, rope: Rope | None, params: AttendParams
    ) -> Tensor:
        assert k is not None and v is not None and rope is not None
        q, k = KERNELS.rope(q, rope), KERNELS.rope(k, rope)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * params.scale
        at = torch.arange(len(q))
        seen = at[None, :] <= at[:, None]
        if params.window_tokens is not None:
            seen &= at[None, :] > at[:, None] - params.window_tokens
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v).contiguous()


class DenseKV:
    def layer(self, index: int) -> DenseLayer:
        return DenseLayer()

    def plain(self) -> None:
        return None


def dense_logits(model: CausalLM, ids: Sequence[int]) -> Tensor:
    """Logits [T, V] float32 after each of the tokens."""
    step = StepInputs(torch.tensor(list(ids)), torch.arange(len(ids)), KERNELS)
    with torch.inference_mode():
        return model.logits(model.forward(step, DenseKV()))


def dense_greedy(model: CausalLM, ids: Sequence[int], n_tokens: int) -> list[int]:
    """The likeliest next tokens, everything computed anew for each."""
    text = list(ids)
    for _ in range(n_tokens):
        text.append(int(dense_logits(model, text)[-1].argmax()))
    return text[len(ids) :]
