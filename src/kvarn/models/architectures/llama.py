"""Llama 1 to 3.x, SmolLM2 and all that share their config: https://huggingface.co/docs/transformers/model_doc/llama."""

from __future__ import annotations

from kvarn.models.base import CausalLM
from kvarn.models.build import Weights
from kvarn.models.config import Config


class Llama(CausalLM):
    """The default in every respect; biases only where the config says so."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.qkv_bias = self.output_bias = bool(config.get("attention_bias"))
        self.mlp_bias = bool(config.get("mlp_bias"))
        super().__init__(config, weights)


ARCHITECTURE = Llama
