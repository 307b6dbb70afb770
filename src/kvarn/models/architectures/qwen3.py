"""Qwen 3: an RMS norm of each query and key head. https://huggingface.co/docs/transformers/model_doc/qwen3"""

from __future__ import annotations

from kvarn.models.base import CausalLM
from kvarn.models.build import Weights
from kvarn.models.config import Config


class Qwen3(CausalLM):
    qk_norm = True

    def __init__(self, config: Config, weights: Weights) -> None:
        self.qkv_bias = self.output_bias = bool(config.get("attention_bias"))
        super().__init__(config, weights)


ARCHITECTURE = Qwen3
