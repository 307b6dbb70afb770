"""Gemma 3, text: five local layers to one global one, two rope bases, QK norm (arXiv 2503.19786)."""

from __future__ import annotations

from kvarn.core.specs import LayerSpec
from kvarn.kernels.api import AttendParams
from kvarn.models.architectures.gemma2 import Gemma2
from kvarn.models.base import FULL, SLIDING
from kvarn.models.config import number


class Gemma3(Gemma2):
    """Gemma 2 without the attention's soft cap; the output's only where the config states one."""

    qk_norm = True
    attention_soft_cap = None
    output_soft_cap = None

    def attend_params(self, spec: LayerSpec) -> AttendParams:
        scale = number(self.config, "query_pre_attn_scalar", 256.0) ** -0.5
        return AttendParams(scale=scale, window_tokens=spec.window_tokens)

    def rope_kinds(self) -> tuple[str | None, ...]:
        windows = (spec.window_tokens for spec in self.layers)
        return tuple(FULL if window is None else SLIDING for window in windows)


ARCHITECTURE = Gemma3
