"""Options that several commands share, and the typed values made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from kvarn.core.errors import InvalidRequest
from kvarn.core.options import CACHE_MODES, NUMERICS, EngineOptions
from kvarn.core.requests import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])
ENGINE_FIELDS = (
    "weights",
    "numerics",
    "fast_memory_bytes",
    "kv",
    "share_layers",
    "cache",
    "block_size",
    "context_tokens",
    "kv_memory_bytes",
    "residual_tokens",
    "prefix_caching",
    "backend",
    "threads",
    "verify",
)
SAMPLING_FIELDS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class Bytes(click.ParamType):
    """A number of bytes: 1500000, 1.5GB, 2GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = value.strip().lower().removesuffix("b").strip()
        number = text.rstrip("kmgti")
        try:
            nbytes = int(float(number) * _UNITS[text[len(number) :].strip()])
        except (KeyError, ValueError, OverflowError):
            self.fail(f"{value!r} is no size; write bytes, or 1.5GB, or 2GiB", param, ctx)
        if nbytes <= 0:
            self.fail(f"{value!r} is not above 0", param, ctx)
        return nbytes


def _stacked(decorators: list[Callable[[F], F]]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def engine_options() -> Callable[[F], F]:
    """The options of `EngineOptions`."""
    return _stacked(
        [
            click.option(
                "--weights",
                default="native",
                metavar="KIND",
                show_default=True,
                help="native (as the file holds them), float32, bfloat16, int8 or int4.",
            ),
            click.option(
                "--numerics",
                type=click.Choice(NUMERICS),
                default="invariant",
                show_default=True,
                help="invariant: an answer's bits do not depend on the batch around it. fast: they may, where that is "
                "faster (prompts of 4-bit weights; bfloat16 and float32 with one stream).",
            ),
            click.option(
                "--fast-memory",
                "fast_memory_bytes",
                type=Bytes(),
                help="With --numerics fast: the most memory for second forms of weights, which take a byte a weight "
                "(default: as much as they want).",
            ),
            click.option(
                "--kv",
                metavar="CHOICE",
                help="The KV cache: a format (int8, or k=int8,v=int4), a policy with its budget (h2o:25%), or both: "
                "h2o:25%+int8.",
            ),
            click.option(
                "--share-layers",
                type=int,
                default=1,
                show_default=True,
                metavar="N",
                help="So many neighbouring layers use the first one's cache (lossy; measure it with kvarn eval).",
            ),
            click.option("--cache", type=click.Choice(CACHE_MODES), default="paged", show_default=True),
            click.option("--block-size", type=int, default=32, show_default=True, help="Tokens of a block."),
            click.option("--context", "context_tokens", type=int, metavar="TOKENS", help="Longest sequence to allow."),
            click.option("--kv-memory", "kv_memory_bytes", type=Bytes(), help="Memory of the KV cache, e.g. 2GiB."),
            click.option(
                "--residual-tokens",
                type=int,
                default=0,
                show_default=True,
                help="Newest tokens that a quantized format leaves in full precision (KIVI). Above 0, its prefixes are "
                "not shared.",
            ),
            click.option(
                "--prefix-caching/--no-prefix-caching",
                default=True,
                show_default=True,
                help="Keep the blocks of finished sequences for those that begin alike.",
            ),
            click.option("--backend", metavar="NAME", help="Kernels to use (default: the fastest that is built)."),
            click.option("--threads", type=int, metavar="N", help="CPU threads (default: as many as cores are free)."),
            click.option(
                "--verify",
                type=click.FloatRange(0, 1),
                default=0.0,
                metavar="SHARE",
                help="Compute this share of the decode steps again over a full cache, and report how far they differ.",
            ),
            click.option(
                "--require-gate",
                is_flag=True,
                help="Refuse a lossy cache that kvarn eval --gate has not passed for this model.",
            ),
        ]
    )


def sampling_options() -> Callable[[F], F]:
    """The options of `SamplingParams`."""
    return _stacked(
        [
            click.option("--max-tokens", type=int, default=256, show_default=True, help="New tokens at most."),
            click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy."),
            click.option("--top-k", type=int, default=0, help="Only the K likeliest tokens (0: all)."),
            click.option("--top-p", type=float, default=1.0, help="Only the likeliest tokens that sum to P."),
            click.option("--min-p", type=float, default=0.0, help="Only tokens at least P times as likely as the top."),
            click.option("--repetition-penalty", type=float, default=1.0, help="Above 1: repeat less."),
            click.option("--seed", type=int, help="Same seed, same answer."),
            click.option("--stop", multiple=True, metavar="TEXT", help="End before this text (repeatable)."),
            click.option("--ignore-eos", is_flag=True, help="Go on after the model's end token."),
        ]
    )


def engine_options_of(given: Mapping[str, Any]) -> EngineOptions:
    """What was asked of the engine; the cache choice is checked before a model is loaded. Raises UnknownName,
    IncompatiblePlan, InvalidRequest."""
    if given["kv"] is not None:
        from kvarn.kv.choice import parse_choice  # noqa: PLC0415  (policies load torch, and the help pages must not)

        parse_choice(given["kv"])
    for name in ("block_size", "share_layers", "context_tokens", "threads"):
        if given[name] is not None and given[name] < 1:
            raise InvalidRequest(f"{name} is {given[name]}", fixes=("use 1 or more",))
    if given["residual_tokens"] < 0:
        raise InvalidRequest(f"residual_tokens is {given['residual_tokens']}", fixes=("use 0 or more",))
    return EngineOptions(**{name: given[name] for name in ENGINE_FIELDS})


def sampling_params_of(given: Mapping[str, Any]) -> SamplingParams:
    """What was asked of the sampler. Raises InvalidRequest."""
    return SamplingParams(**{name: given[name] for name in SAMPLING_FIELDS})
