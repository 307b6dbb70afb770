"""Qwen 2 and 2.5: biases on queries, keys and values. https://huggingface.co/docs/transformers/model_doc/qwen2"""

from __future__ import annotations

from kvarn.models.base import CausalLM
from kvarn.models.windows import from_max_window_layers


class Qwen2(CausalLM):
    qkv_bias = True

    def windows(self) -> tuple[int | None, ...]:
        return from_max_window_layers(self.config, self.n_layers)


ARCHITECTURE = Qwen2
