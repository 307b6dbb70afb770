"""State and parameters of the recurrent and convolution mixers that hybrids are built from.

A convolution of kernel k keeps its last k - 1 inputs. Recurrent ("ssm") states are counted in float32, as llama.cpp
keeps them and as most configs ask (mamba_ssm_dtype); convolution states in the model's own type. An engine's profile
may count other types. Names are the same everywhere: 'conv', 'ssm'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvarn.core.geometry.parts import linear
from kvarn.core.geometry.reader import ConfigReader
from kvarn.core.specs import LayerSpec, StateTensor

_FLOATS = {"float32", "bfloat16", "float16"}


@dataclass(frozen=True, slots=True)
class Mixer:
    """A token mixer without a cache that grows. state: per sequence. parameters: of one layer."""

    state: tuple[StateTensor, ...]
    parameters: int

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(state=self.state)

    def beside(self, attention: LayerSpec) -> LayerSpec:
        """A layer that has both."""
        return replace(attention, state=self.state)


def states(c: ConfigReader, channels: int, columns: int, ssm: int) -> tuple[StateTensor, ...]:
    """A convolution's last `columns` inputs of `channels` numbers, and a recurrent state of `ssm` numbers; either may
    be 0."""
    ssm_dtype = str(c.get("mamba_ssm_dtype", "mamba_ssm_cache_dtype", default="float32"))
    model_dtype = str(c.stated("dtype", "torch_dtype") or "bfloat16").removeprefix("torch.")
    found = (
        StateTensor("conv", channels * columns, model_dtype if model_dtype in _FLOATS else "bfloat16", columns),
        StateTensor("ssm", ssm, ssm_dtype if ssm_dtype in _FLOATS else "float32"),
    )
    return tuple(tensor for tensor in found if tensor.elements)


def mamba1(
    c: ConfigReader,
    hidden: int,
    inner: int,
    d_state: int,
    kernel: int,
    rank: int,
    *,
    conv_bias: bool = True,
    proj_bias: bool = False,
) -> Mixer:
    """Selective state space (Mamba, arXiv:2312.00752, section 3)."""
    parameters = (
        linear(hidden, 2 * inner, proj_bias)
        + inner * kernel
        + (inner if conv_bias else 0)
        + inner * (rank + 2 * d_state)
        + linear(rank, inner, True)
        + inner * d_state
        + inner
        + linear(inner, hidden, proj_bias)
    )
    return Mixer(states(c, inner, kernel - 1, inner * d_state), parameters)


def mamba2(
    c: ConfigReader,
    hidden: int,
    inner: int,
    n_heads: int,
    n_groups: int,
    d_state: int,
    kernel: int,
    *,
    conv_bias: bool = True,
    proj_bias: bool = False,
    norm: bool = True,
) -> Mixer:
    """State-space duality (Mamba-2, arXiv:2405.21060, section 7): inner = heads x head dim."""
    conv = inner + 2 * n_groups * d_state
    parameters = (
        linear(hidden, inner + conv + n_heads, proj_bias)
        + conv * kernel
        + (conv if conv_bias else 0)
        + 3 * n_heads
        + (inner if norm else 0)
        + linear(inner, hidden, proj_bias)
    )
    return Mixer(states(c, conv, kernel - 1, inner * d_state), parameters)


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of a gated delta rule: keys and values may differ in number and size."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def key(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value(self) -> int:
        return self.value_heads * self.value_dim

    def state(self, c: ConfigReader) -> tuple[StateTensor, ...]:
        channels = 2 * self.key + self.value
        return states(c, channels, self.kernel - 1, self.value_heads * self.key_dim * self.value_dim)


def delta_heads(c: ConfigReader) -> DeltaHeads:
    return DeltaHeads(
        c.size("linear_num_key_heads"),
        c.size("linear_num_value_heads"),
        c.size("linear_key_head_dim"),
        c.size("linear_value_head_dim"),
        c.size("linear_conv_kernel_dim"),
    )


def gated_delta(c: ConfigReader, hidden: int, d: DeltaHeads) -> Mixer:
    """Gated DeltaNet (arXiv:2412.06464): queries, keys, values, an output gate, two scalars a head, a convolution."""
    parameters = (
        hidden * (2 * d.key + 2 * d.value)
        + hidden * 2 * d.value_heads
        + (2 * d.key + d.value) * d.kernel
        + 2 * d.value_heads
        + d.value_dim
        + d.value * hidden
    )
    return Mixer(d.state(c), parameters)


def kimi_delta(c: ConfigReader, hidden: int, heads: int, dim: int, kernel: int, *, low_rank: bool) -> Mixer:
    """Kimi Delta Attention (arXiv:2510.26692): a forget gate a channel and an output gate, low-rank or full."""
    d, width = DeltaHeads(heads, heads, dim, dim, kernel), heads * dim
    gate = hidden * dim + dim * width if low_rank else hidden * width
    parameters = 4 * hidden * width + 3 * width * kernel + width + heads + 2 * gate + hidden * heads + dim
    return Mixer(d.state(c), parameters)


def at(indices: Iterable[int], n_layers: int) -> list[bool]:
    """True at the given layer indices."""
    chosen = set(indices)
    return [i in chosen for i in range(n_layers)]
