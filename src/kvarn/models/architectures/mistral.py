"""Mistral: Llama with a window on every layer. https://huggingface.co/docs/transformers/model_doc/mistral"""

from __future__ import annotations

from kvarn.models.base import CausalLM


class Mistral(CausalLM):
    """The window is the geometry's (`sliding_window`; null means none)."""


ARCHITECTURE = Mistral
