"""A causal language model: what all architectures share, and how one is found by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from kvarn.core.errors import UnknownArchitecture
from kvarn.core.geometry import geometry_of
from kvarn.core.registry import names_in
from kvarn.core.specs import LayerKind, LayerSpec, share_layers
from kvarn.kernels.api import AttendParams, Backend, Decoder, Rope
from kvarn.kv.view import StepInputs, StepKV
from kvarn.models.attention import Attention
from kvarn.models.build import Weights
from kvarn.models.config import Config, activation, integer, number
from kvarn.models.layers import DecoderLayer, PreNormLayer
from kvarn.models.mlp import GatedMLP
from kvarn.models.rope import RotaryEmbedding, rotary_embedding
from kvarn.models.weights.base import MANY_ROWS, Product, total_bytes

ARCHITECTURES = "kvarn.models.architectures"
_ALIASES = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
SHARE_LAYERS = "kvarn_share_layers"  # beside the config's own keys: see `kvarn.core.specs.share_layers`
FULL, SLIDING = "full_attention", "sliding_attention"


class CausalLM:
    """A decoder-only transformer for inference. Holds weights only; the caller runs it under `torch.inference_mode()`.

    config: Hugging Face's vocabulary. layers: what each layer keeps a token. An architecture's file subclasses this and
    says what is different; the defaults are Llama's.
    """

    qkv_bias = False
    output_bias = False
    mlp_bias = False
    qk_norm = False
    tied_by_default = False
    plus_one_norms = False
    default_activation = "silu"
    default_eps = 1e-6

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        self.hidden_size = integer(config, "hidden_size")
        self.vocab_size = integer(config, "vocab_size")
        self.eps = number(config, "rms_norm_eps", self.default_eps)
        self.layers = share_layers(geometry_of(dict(config)).layers, config.get(SHARE_LAYERS, 1))
        self.activations = weights.activations
        self._ropes: dict[str | None, RotaryEmbedding] = {
            kind: rotary_embedding(config, spec.k_dim, kind)
            for kind, spec in zip(self.rope_kinds(), self.layers, strict=True)
        }
        self._weights = weights
        self._embedding = weights.table("model.embed_tokens.weight", self.vocab_size, self.hidden_size, self.tied)
        self._embedding_scale = self.embedding_scale()
        self._decoder: tuple[DecoderLayer, ...] = tuple(self.decoder_layer(i) for i in range(len(self.layers)))
        self._norm = self.norm("model.norm.weight", self.hidden_size)
        self._output = self._embedding.product() if self.tied else self.product("lm_head", self.vocab_size)
        self._soft_cap = self.logit_soft_cap()
        self._rope_kinds = self.rope_kinds()
        self._rope_of = tuple(list(self._ropes).index(kind) for kind in self._rope_kinds)
        self._prepared: dict[tuple[Backend, bool], Decoder | None] = {}

    # What a step does.

    def forward(self, step: StepInputs, kv: StepKV) -> Tensor:
        """One step over a ragged batch. Returns hidden states [R, hidden] after the last norm, of `step.read_rows`."""
        whole, plain = self._whole(step.kernels, len(step.token_ids)), kv.plain()
        if whole is None or plain is None:
            return self.forward_layers(None, step, kv, range(len(self._decoder)))
        ropes = tuple(self._turned(step).values())
        return whole.run(self._embedded(step.token_ids), plain, ropes, self._rope_of, step.read_rows)

    def forward_layers(self, x: Tensor | None, step: StepInputs, kv: StepKV, layers: range) -> Tensor:
        """A part of `forward`, the same bits: x [T, hidden] as the part before gave it, None before layer 0. Goes
        through these layers one by one; the last norm comes with the last one, and then [R, hidden] is returned."""
        ropes = self._turned(step)
        if x is None:
            x = self._embedded(step.token_ids)
        for index in layers:
            x = self._decoder[index](x, step.kernels, kv.layer(index), ropes[self._rope_kinds[index]])
        return self._after(layers, x, step)

    def _after(self, layers: range, x: Tensor, step: StepInputs) -> Tensor:
        """x [T, hidden] after these layers; where they are the last ones, normed, and only the rows that are read."""
        if layers.stop < len(self._decoder):
            return x
        return step.kernels.rms_norm(x if step.read_rows is None else x[step.read_rows], self._norm, self.eps)

    def _turned(self, step: StepInputs) -> dict[str | None, Rope]:
        """The step's rotations, by kind."""
        return {kind: rope(step.positions, step.span_tokens) for kind, rope in self._ropes.items()}

    def _embedded(self, token_ids: Tensor) -> Tensor:
        x = self._embedding.rows(token_ids)
        return x if self._embedding_scale is None else x * self._embedding_scale

    def _whole(self, kernels: Backend, rows: int) -> Decoder | None:
        """All layers as one call of this backend, prepared once; None where it or a layer cannot do that."""
        key = kernels, rows >= MANY_ROWS
        if key not in self._prepared:
            said = [p for layer in self._decoder if (p := layer.program(rows)) is not None]
            whole = len(said) == len(self._decoder)
            self._prepared[key] = kernels.decoder(said, self._norm, self.eps) if whole else None
        return self._prepared[key]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], rows of `forward`'s result -> float32 [R, vocab]."""
        logits = self._output(hidden).float()
        return self._soft_cap * torch.tanh(logits / self._soft_cap) if self._soft_cap else logits

    # What it is.

    @property
    def tied(self) -> bool:
        """Is the output matrix the embedding?"""
        stated = self.config.get("tie_word_embeddings")
        return self.tied_by_default if stated is None else bool(stated)

    @property
    def rope_by_length(self) -> bool:
        """Do rotations depend on the length that a sequence may reach (`StepInputs.span_tokens`)? Then sequences of
        different spans cannot share blocks."""
        return any(rope.by_length for rope in self._ropes.values())

    @property
    def turns(self) -> tuple[Callable[[Tensor], Rope] | None, ...]:
        """Each layer's rotation as a function of positions; None where it depends on the sequence's length."""
        ropes = (self._ropes[kind] for kind in self._rope_kinds)
        return tuple(None if rope.by_length else rope.turn for rope in ropes)

    @property
    def max_context_tokens(self) -> int | None:
        return self.config.get("max_position_embeddings")

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of weights."""
        return self._weights.tensors()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory, shared ones counted once."""
        return total_bytes(self.tensors())

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a step of a single token reads."""
        return self._weights.read_bytes()

    # What an architecture may change.

    def rope_kinds(self) -> tuple[str | None, ...]:
        """Each layer's key into the rope parameters."""
        return (None,) * len(self.layers)

    def embedding_scale(self) -> float | None:
        """What embeddings are multiplied by, None for nothing."""
        return None

    def logit_soft_cap(self) -> float | None:
        """c of c * tanh(logits / c), None for no cap."""
        return number(self.config, "final_logit_softcapping", 0.0) or None

    def attend_params(self, spec: LayerSpec) -> AttendParams:
        return AttendParams(scale=spec.k_dim**-0.5, window_tokens=spec.window_tokens)

    def decoder_layer(self, index: int) -> DecoderLayer:
        at = f"model.layers.{index}"
        return PreNormLayer(
            attention=self.attention(index),
            mlp=self.mlp(index),
            attention_norm=self.norm(f"{at}.input_layernorm.weight", self.hidden_size),
            mlp_norm=self.norm(f"{at}.post_attention_layernorm.weight", self.hidden_size),
            eps=self.eps,
        )

    def qkv(self, at: str, spec: LayerSpec) -> Product:
        """The product that makes queries, keys and values, or queries alone where another layer's cache is used; `at`
        names the attention block."""
        rows = {"q": spec.query_heads * spec.k_dim}
        if spec.kind is not LayerKind.SHARED:
            rows |= {"k": spec.kv_heads * spec.k_dim, "v": spec.kv_heads * spec.v_dim}
        parts = ((f"{at}.{side}_proj", count) for side, count in rows.items())
        return self._weights.linear(self.hidden_size, *parts, bias=self.qkv_bias)

    def gate_up(self, at: str) -> Product:
        """The product that makes gate and up; `at` names the MLP block."""
        ffn = self.ffn_size
        parts = (f"{at}.gate_proj", ffn), (f"{at}.up_proj", ffn)
        return self._weights.linear(self.hidden_size, *parts, bias=self.mlp_bias)

    # Blocks ready to use.

    @property
    def ffn_size(self) -> int:
        return integer(self.config, "intermediate_size")

    def attention(self, index: int) -> Attention:
        at, spec = f"model.layers.{index}.self_attn", self.layers[index]
        mixed = spec.query_heads * spec.v_dim
        out = self._weights.linear(mixed, (f"{at}.o_proj", self.hidden_size), bias=self.output_bias)
        qkv, params = self.qkv(at, spec), self.attend_params(spec)
        if not self.qk_norm:
            return Attention(spec, qkv, out, params)
        q_norm, k_norm = (self.norm(f"{at}.{side}_norm.weight", spec.k_dim) for side in "qk")
        return Attention(spec, qkv, out, params, q_norm, k_norm, self.eps)

    def mlp(self, index: int) -> GatedMLP:
        at = f"model.layers.{index}.mlp"
        down = self._weights.linear(self.ffn_size, (f"{at}.down_proj", self.hidden_size), bias=self.mlp_bias)
        return GatedMLP(self.gate_up(at), down, activation(self.config, self.default_activation))

    def norm(self, name: str, size: int) -> Tensor:
        return self._weights.norm(name, size, plus_one=self.plus_one_norms)

    def product(self, name: str, rows: int) -> Product:
        return self._weights.linear(self.hidden_size, (name, rows))


def architecture_names() -> tuple[str, ...]:
    """model_types that can be built."""
    return tuple(sorted((*names_in(ARCHITECTURES), *_ALIASES)))


def load_architecture(model_type: str) -> type[CausalLM]:
    """The class for a config's model_type. Raises UnknownArchitecture with the ones that are there."""
    name = _ALIASES.get(model_type, model_type)
    if name not in names_in(ARCHITECTURES):
        known = ", ".join(architecture_names())
        raise UnknownArchitecture(
            f"architecture {model_type!r} is not implemented; these are: {known}",
            fixes=(f"kvarn plan still counts its memory; add {ARCHITECTURES.replace('.', '/')}/{name}.py",),
        )
    return import_module(f"{ARCHITECTURES}.{name}").ARCHITECTURE
