"""Phi 3 and 3.5 mini, Phi 4 mini: query, key and value stored as one tensor, gate and up as another; LongRoPE.
https://huggingface.co/docs/transformers/model_doc/phi3"""

from __future__ import annotations

from kvarn.models.base import CausalLM
from kvarn.models.weights.base import Product


class Phi3(CausalLM):
    def windows(self) -> tuple[int | None, ...]:
        return (self.config.get("sliding_window"),) * self.n_layers

    def qkv(self, at: str) -> Product:
        rows = (self.query_heads + 2 * self.kv_heads) * self.head_dim
        return self.product(f"{at}.qkv_proj", rows)

    def gate_up(self, at: str) -> Product:
        return self.product(f"{at}.gate_up_proj", 2 * self.ffn_size)


ARCHITECTURE = Phi3
