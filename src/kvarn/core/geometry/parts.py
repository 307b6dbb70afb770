"""What a family of architectures says about a model: per layer what is stored, and how many parameters there are.

Counting helpers give numbers of parameters (elements). Families count what transformers' modules hold; a test builds
the modules without memory and compares."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvarn.core.specs import LayerSpec


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One layer. parameters: all but routed experts."""

    spec: LayerSpec
    parameters: int
    experts: int = 0
    active_experts: int = 0


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Parameters of a layer's feed-forward part, and the width of a token's widest activation in it."""

    parameters: int
    experts: int = 0
    active_experts: int = 0
    width: int = 0
    n_experts: int = 0
    n_active: int = 0


@dataclass(frozen=True, slots=True)
class ModelParts:
    """embedding, output: parameters (output 0 where tied). other: final norm and what stands outside the layers."""

    layers: tuple[LayerPart, ...]
    embedding: int
    output: int
    other: int = 0
    drafts: tuple[LayerPart, ...] = ()
    width: int = 0
    n_experts: int = 0
    n_active: int = 0
    countable: bool = field(default=True)


def linear(n_in: int, n_out: int, bias: bool = False) -> int:
    return n_in * n_out + (n_out if bias else 0)


def attention(
    hidden: int, q_heads: int, kv_heads: int, k_dim: int, v_dim: int, *, qkv_bias: bool = False, o_bias: bool = False
) -> int:
    """Query, key, value and output projections."""
    qkv = linear(hidden, q_heads * k_dim + kv_heads * (k_dim + v_dim), qkv_bias)
    return qkv + linear(q_heads * v_dim, hidden, o_bias)


def gated_mlp(hidden: int, width: int, *, bias: bool = False) -> FeedForward:
    """Gate, up and down projection."""
    return FeedForward(2 * linear(hidden, width, bias) + linear(width, hidden, bias), width=width)


def plain_mlp(hidden: int, width: int, *, bias: bool = False) -> FeedForward:
    """Up and down projection."""
    return FeedForward(linear(hidden, width, bias) + linear(width, hidden, bias), width=width)


def experts(
    hidden: int,
    width: int,
    n_experts: int,
    n_active: int,
    *,
    shared_width: int = 0,
    router_bias: bool = False,
    extra: int = 0,
    gated: bool = True,
    bias: bool = False,
) -> FeedForward:
    """Routed experts, a router, and shared experts (`shared_width` in all). extra: whatever else is always read."""
    one = (gated_mlp if gated else plain_mlp)(hidden, width, bias=bias).parameters
    shared = (gated_mlp if gated else plain_mlp)(hidden, shared_width).parameters if shared_width else 0
    router = linear(hidden, n_experts) + (n_experts if router_bias else 0)
    return FeedForward(
        shared + router + extra,
        experts=n_experts * one,
        active_experts=n_active * one,
        width=n_active * width + shared_width,
        n_experts=n_experts,
        n_active=n_active,
    )


def layer(spec: LayerSpec, mixer: int, feed_forward: FeedForward | None, norms: int) -> LayerPart:
    """Join a layer's token mixer, feed-forward part and norms."""
    ff = feed_forward or FeedForward(0)
    return LayerPart(spec, mixer + ff.parameters + norms, ff.experts, ff.active_experts)
