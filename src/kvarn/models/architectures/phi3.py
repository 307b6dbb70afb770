"""Phi 3 and 3.5 mini, Phi 4 mini: query, key and value stored as one tensor, gate and up as another; LongRoPE.
https://huggingface.co/docs/transformers/model_doc/phi3"""

from __future__ import annotations

from kvarn.core.specs import LayerSpec
from kvarn.models.base import CausalLM
from kvarn.models.weights.base import Product


class Phi3(CausalLM):
    """A window on every layer where the config states one."""

    default_eps = 1e-5

    def qkv(self, at: str, spec: LayerSpec) -> Product:
        rows = (spec.query_heads + spec.kv_heads) * spec.k_dim + spec.kv_heads * spec.v_dim
        return self.product(f"{at}.qkv_proj", rows)

    def gate_up(self, at: str) -> Product:
        return self.product(f"{at}.gate_up_proj", 2 * self.ffn_size)


ARCHITECTURE = Phi3
