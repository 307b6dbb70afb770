"""What a request asks and what it gets. Checked here once, whichever door it came through."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvarn.core.errors import InvalidRequest

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 100
MAX_BIAS = 1e9


def _require(ok: bool, what: str, way_out: str) -> None:
    if not ok:
        raise InvalidRequest(what, fixes=(way_out,))


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens.

    max_tokens: new tokens at most. temperature 0: greedy. top_k 0: off; top_p 1: off; min_p 0: off.
    repetition_penalty (CTRL, 2019) divides positive and multiplies negative logits of tokens seen in prompt or output;
    presence and frequency penalties subtract once, and per occurrence, for tokens of the output.
    logit_bias: token id -> added to its logit. n: completions of one prompt. logprobs: top-N a generated token (0: only
    the sampled one's); prompt_logprobs likewise for the prompt. ignore_eos: do not stop at the model's end tokens.
    Raises InvalidRequest on construction.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._check_counts()
        self._check_ranges()
        self._check_stops()

    def _check_counts(self) -> None:
        _require(
            _integer(self.max_tokens) and self.max_tokens >= 1, f"max_tokens is {self.max_tokens!r}", "use 1 or more"
        )
        _require(_integer(self.n) and 1 <= self.n <= 128, f"n is {self.n!r}", "use 1 to 128")
        _require(_integer(self.top_k) and self.top_k >= 0, f"top_k is {self.top_k!r}", "use 0 (off) or more")
        seed_ok = self.seed is None or (_integer(self.seed) and -(2**63) <= self.seed < 2**64)
        _require(seed_ok, f"seed is {self.seed!r}", "use a 64-bit integer")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ok = value is None or (_integer(value) and 0 <= value <= MAX_LOGPROBS)
            _require(ok, f"{name} is {value!r}", f"use 0 to {MAX_LOGPROBS}")

    def _check_ranges(self) -> None:
        def within(name: str, low: float, high: float, open_low: bool = False) -> None:
            value = getattr(self, name)
            ok = _finite(value) and low <= value <= high and not (open_low and value == low)
            _require(ok, f"{name} is {value!r}", f"use {'above ' if open_low else ''}{low:g} to {high:g}")

        within("temperature", 0.0, 100.0)
        within("top_p", 0.0, 1.0, open_low=True)
        within("min_p", 0.0, 1.0)
        within("repetition_penalty", 0.0, 100.0, open_low=True)
        within("presence_penalty", -100.0, 100.0)
        within("frequency_penalty", -100.0, 100.0)
        _require(isinstance(self.logit_bias, Mapping), f"logit_bias is {self.logit_bias!r}", "map token ids to numbers")
        ok = all(_integer(t) and t >= 0 and _finite(b) and abs(b) <= MAX_BIAS for t, b in self.logit_bias.items())
        _require(
            ok,
            "logit_bias holds a token id or a bias that is not a number in range",
            f"map token ids (>= 0) to numbers of at most {MAX_BIAS:g}",
        )

    def _check_stops(self) -> None:
        ok = isinstance(self.stop, (tuple, list)) and all(isinstance(s, str) and s for s in self.stop)
        _require(ok, f"stop is {self.stop!r}", "use a string or a list of non-empty strings")
        _require(
            len(self.stop) <= MAX_STOP_STRINGS, f"{len(self.stop)} stop strings", f"use at most {MAX_STOP_STRINGS}"
        )
        object.__setattr__(self, "stop", tuple(self.stop))
        ids_ok = isinstance(self.stop_token_ids, Iterable) and all(_integer(t) and t >= 0 for t in self.stop_token_ids)
        _require(ids_ok, f"stop_token_ids is {self.stop_token_ids!r}", "use token ids (>= 0)")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the model's own distribution (before temperature and filters)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionTrace:
    """What an answer's way through the engine was. waits, preemptions: the reasons, in words. cached_tokens: found in
    the prefix index; prefix: why no more of them (None: nothing was looked up). physical_bytes: of the blocks held at
    the end, shared ones included; logical_bytes: its cached tokens in full precision; bytes_by_format: the physical
    ones by the KV format of the blocks, without those that hold none."""

    waits: tuple[str, ...] = ()
    preemptions: tuple[str, ...] = ()
    cached_tokens: int = 0
    physical_bytes: int = 0
    logical_bytes: int = 0
    prefix: str | None = None
    bytes_by_format: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One of a request's n answers. finish_reason: 'stop', 'length', 'cancelled' or 'error'."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    trace: CompletionTrace | None = None


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds, from the request's arrival."""

    queue_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. prompt_logprobs[i] belongs to prompt token i; the first is None."""

    request_id: str
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    timings: RequestTimings
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer. Joined in order, the texts of one index equal its completion's text."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
