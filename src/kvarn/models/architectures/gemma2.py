"""Gemma 2: norms on both sides of each block, soft caps, a window on every second layer (arXiv 2408.00118)."""

from __future__ import annotations

import torch

from kvarn.core.errors import ConfigError
from kvarn.core.specs import LayerSpec
from kvarn.kernels.api import AttendParams
from kvarn.models.base import CausalLM
from kvarn.models.build import Weights
from kvarn.models.config import Config, number
from kvarn.models.layers import DecoderLayer, SandwichLayer


class Gemma2(CausalLM):
    """Norms apply (1 + w); embeddings are scaled by sqrt(hidden), rounded to the activations' dtype."""

    tied_by_default = True
    plus_one_norms = True
    default_activation = "gelu_pytorch_tanh"
    attention_soft_cap: float | None = 50.0
    output_soft_cap: float | None = 30.0

    def __init__(self, config: Config, weights: Weights) -> None:
        if config.get("use_bidirectional_attention"):
            raise ConfigError(
                f"{config.get('model_type')}: use_bidirectional_attention is set", fixes=("use a causal model",)
            )
        self.qkv_bias = self.output_bias = bool(config.get("attention_bias"))
        super().__init__(config, weights)

    def embedding_scale(self) -> float:
        return torch.tensor(self.hidden_size**0.5, dtype=self.activations).item()

    def attend_params(self, spec: LayerSpec) -> AttendParams:
        scale = number(self.config, "query_pre_attn_scalar", 256.0) ** -0.5
        return AttendParams(
            scale=scale,
            window_tokens=spec.window_tokens,
            soft_cap=self._cap("attn_logit_softcapping", self.attention_soft_cap),
        )

    def logit_soft_cap(self) -> float | None:
        return self._cap("final_logit_softcapping", self.output_soft_cap)

    def _cap(self, key: str, default: float | None) -> float | None:
        """The config's cap; a key that is null means none, a key that is absent the architecture's own."""
        return self.config.get(key, default)

    def decoder_layer(self, index: int) -> DecoderLayer:
        at = f"model.layers.{index}"
        before_attention, after_attention, before_mlp, after_mlp = (
            self.norm(f"{at}.{name}_layernorm.weight", self.hidden_size)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        norms = before_attention, after_attention, before_mlp, after_mlp
        return SandwichLayer(self.attention(index), self.mlp(index), norms, self.eps)


ARCHITECTURE = Gemma2
