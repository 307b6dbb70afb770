"""Gemma 4, text: the last layers read earlier layers' caches; each layer gets an input of its own from a second table
(https://huggingface.co/docs/transformers/model_doc/gemma4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.core.errors import ConfigError
from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.kernels.api import AttendParams, Backend, LayerProgram, Rope
from kvarn.kv.view import LayerKV, StepInputs, StepKV
from kvarn.models.architectures.gemma3_text import Gemma3
from kvarn.models.build import Weights
from kvarn.models.config import Config, activation, integer
from kvarn.models.layers import SandwichLayer
from kvarn.models.mlp import GatedMLP
from kvarn.models.weights.base import Product


@dataclass(frozen=True, slots=True)
class NormedAttention:
    """Attention with norms on queries, keys and values (the last without a weight), unscaled. The layer whose cache is
    read made the keys and values; where both come from one projection, `qkv` makes queries and keys."""

    spec: LayerSpec
    qkv: Product
    out: Product
    params: AttendParams
    q_norm: Tensor
    k_norm: Tensor | None
    v_norm: Tensor | None
    eps: float
    v_is_k: bool

    def __call__(
        self, x: Tensor, norm: Tensor, eps: float, residual: Tensor | None, kernels: Backend, kv: LayerKV, rope: Rope
    ) -> Tensor:
        """residual + attention over rms_norm(x, norm); x, residual [T, hidden] -> [T, hidden]."""
        heads = self.qkv.normed(x, norm, eps, kernels).view(x.shape[0], -1, self.spec.k_dim)
        q = kernels.rms_norm(heads[:, : self.spec.query_heads], self.q_norm, self.eps)
        k = v = None
        if self.k_norm is not None and self.v_norm is not None:
            own = heads[:, self.spec.query_heads :]
            k, v = own[:, : self.spec.kv_heads], own if self.v_is_k else own[:, self.spec.kv_heads :]
            k, v = kernels.rms_norm(k, self.k_norm, self.eps), kernels.rms_norm(v, self.v_norm, self.eps)
        mixed = kv.append_and_attend(q, k, v, rope, self.params)
        return self.out.added(mixed.view(x.shape[0], -1), residual)


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """A sandwich layer, then a gated input of the layer's own, then a factor. gate: hidden -> P, out: P -> hidden, both
    None for sizes without such inputs."""

    inner: SandwichLayer
    gate: Product | None
    out: Product | None
    norm: Tensor | None
    factor: Tensor
    activation: str
    eps: float

    def __call__(self, x: Tensor, kernels: Backend, kv: LayerKV, rope: Rope, own_input: Tensor | None = None) -> Tensor:
        """x [T, hidden], own_input [T, P] -> [T, hidden]."""
        x = self.inner(x, kernels, kv, rope)
        if self.gate is not None and self.out is not None and self.norm is not None and own_input is not None:
            gated = kernels.gated(self.gate(x), own_input.contiguous(), self.activation)
            x = x + kernels.rms_norm(self.out(gated), self.norm, self.eps)
        return x * self.factor

    def program(self, rows: int) -> LayerProgram | None:
        """None: its own input comes between the layers."""
        return None


class Gemma4(Gemma3):
    """Gemma 3's layers with plain norms, cache sharing (`num_kv_shared_layers`) and per-layer inputs."""

    plus_one_norms = False

    def __init__(self, config: Config, weights: Weights) -> None:
        if config.get("enable_moe_block"):
            raise ConfigError("gemma4_text: enable_moe_block is set", fixes=("use one of the dense sizes",))
        self._own_size = int(config.get("hidden_size_per_layer_input") or 0)
        super().__init__(config, weights)
        if self._own_size:
            wide = len(self.layers) * self._own_size
            rows = integer(config, "vocab_size_per_layer_input")
            self._own_table = weights.table("model.embed_tokens_per_layer.weight", rows, wide, False)
            self._own_projection = self.product("model.per_layer_model_projection", wide)
            self._own_norm = self.norm("model.per_layer_projection_norm.weight", self._own_size)

    def forward_layers(self, x: Tensor | None, step: StepInputs, kv: StepKV, layers: range) -> Tensor:
        """See `CausalLM.forward_layers`; each layer gets its slice of the per-layer inputs too."""
        kernels, ropes, embedded = step.kernels, self._turned(step), self._embedded(step.token_ids)
        own = self._own_inputs(step.token_ids, embedded, kernels) if self._own_size else None
        x = embedded if x is None else x
        for index in layers:
            layer = self._decoder[index]
            assert isinstance(layer, Gemma4Layer)
            rope = ropes[self._rope_kinds[index]]
            x = layer(x, kernels, kv.layer(index), rope, None if own is None else own[:, index])
        return self._after(layers, x, step)

    def _own_inputs(self, token_ids: Tensor, x: Tensor, kernels: Backend) -> Tensor:
        """[T, layers, P]: what the tokens are, and what their embeddings say."""
        shape = (len(token_ids), len(self.layers), self._own_size)
        scale = torch.tensor(self._own_size**0.5, dtype=self.activations).item()
        tokens = self._own_table.rows(token_ids).view(shape) * scale
        projected = (self._own_projection(x) * self.hidden_size**-0.5).view(shape)
        return (kernels.rms_norm(projected, self._own_norm, self.eps) + tokens) * 2**-0.5

    def attend_params(self, spec: LayerSpec) -> AttendParams:
        return AttendParams(scale=1.0, window_tokens=spec.window_tokens)

    def decoder_layer(self, index: int) -> Gemma4Layer:
        at, size = f"model.layers.{index}", self._own_size
        inner = super().decoder_layer(index)
        assert isinstance(inner, SandwichLayer)
        return Gemma4Layer(
            inner,
            self.product(f"{at}.per_layer_input_gate", size) if size else None,
            self._weights.linear(size, (f"{at}.per_layer_projection", self.hidden_size)) if size else None,
            self.norm(f"{at}.post_per_layer_input_norm.weight", self.hidden_size) if size else None,
            self.norm(f"{at}.layer_scalar", 1).to(self.activations),
            activation(self.config, self.default_activation),
            self.eps,
        )

    def attention(self, index: int) -> NormedAttention:  # pyright: ignore[reportIncompatibleMethodOverride]
        at, spec = f"model.layers.{index}.self_attn", self.layers[index]
        shared = spec.kind is LayerKind.SHARED
        v_is_k = bool(self.config.get("attention_k_eq_v")) and spec.window_tokens is None
        sides = [("q", spec.query_heads)] if shared else [("q", spec.query_heads), ("k", spec.kv_heads)]
        if not (shared or v_is_k):
            sides.append(("v", spec.kv_heads))
        parts = [(f"{at}.{side}_proj", heads * spec.k_dim) for side, heads in sides]
        return NormedAttention(
            spec,
            self._weights.linear(self.hidden_size, *parts, bias=self.qkv_bias),
            self._weights.linear(
                spec.query_heads * spec.v_dim, (f"{at}.o_proj", self.hidden_size), bias=self.output_bias
            ),
            self.attend_params(spec),
            self.norm(f"{at}.q_norm.weight", spec.k_dim),
            None if shared else self.norm(f"{at}.k_norm.weight", spec.k_dim),
            None if shared else torch.ones(spec.v_dim),
            self.eps,
            v_is_k,
        )

    def mlp(self, index: int) -> GatedMLP:
        at, spec = f"model.layers.{index}.mlp", self.layers[index]
        double = bool(self.config.get("use_double_wide_mlp")) and spec.kind is LayerKind.SHARED
        ffn = self.ffn_size * (2 if double else 1)
        gate_up = self._weights.linear(self.hidden_size, (f"{at}.gate_proj", ffn), (f"{at}.up_proj", ffn))
        down = self._weights.linear(ffn, (f"{at}.down_proj", self.hidden_size))
        return GatedMLP(gate_up, down, activation(self.config, self.default_activation))


ARCHITECTURE = Gemma4
