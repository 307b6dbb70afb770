"""Mistral: Llama with a window on every layer. https://huggingface.co/docs/transformers/model_doc/mistral"""

from __future__ import annotations

from kvarn.models.base import CausalLM


class Mistral(CausalLM):
    """`sliding_window` null means no window."""

    def windows(self) -> tuple[int | None, ...]:
        return (self.config.get("sliding_window"),) * self.n_layers


ARCHITECTURE = Mistral
