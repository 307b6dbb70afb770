"""Qwen 3: an RMS norm of each query and key head. https://huggingface.co/docs/transformers/model_doc/qwen3"""

from __future__ import annotations

from kvarn.models.base import CausalLM
from kvarn.models.build import Weights
from kvarn.models.config import Config
from kvarn.models.windows import from_max_window_layers


class Qwen3(CausalLM):
    qk_norm = True

    def __init__(self, config: Config, weights: Weights) -> None:
        self.qkv_bias = self.output_bias = bool(config.get("attention_bias"))
        super().__init__(config, weights)

    @property
    def head_dim(self) -> int:
        return self.config.get("head_dim") or 128  # stated apart from hidden size / heads; 128 in every release

    def windows(self) -> tuple[int | None, ...]:
        return from_max_window_layers(self.config, self.n_layers)


ARCHITECTURE = Qwen3
