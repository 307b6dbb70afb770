"""Qwen 2 and 2.5: biases on queries, keys and values. https://huggingface.co/docs/transformers/model_doc/qwen2"""

from __future__ import annotations

from kvarn.models.base import CausalLM


class Qwen2(CausalLM):
    qkv_bias = True


ARCHITECTURE = Qwen2
