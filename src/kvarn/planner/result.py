"""The plan: what `kvarn.plan` returns and `kvarn plan --json` prints. Frozen; JSON both ways, bytes as integers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvarn.core.errors import InvalidRequest
from kvarn.planner.terms import Term

Verdict = Literal["fits", "does_not_fit", "unknown"]
EXIT_CODES = {"fits": 0, "does_not_fit": 1, "unknown": 2}


@dataclass(frozen=True, slots=True)
class RankKV:
    """Cache bytes on the fullest rank. stage: which pipeline stage that is."""

    bytes_per_token: int
    bytes_per_sequence: int
    bytes_total: int
    k_bytes: int
    v_bytes: int
    state_bytes: int
    stage: int = 0


@dataclass(frozen=True, slots=True)
class KVFigures:
    """Cache bytes of the whole model, as one device would store it.

    bytes_per_token: what one more token adds to a sequence whose windows are full; where every layer has a window, what
    it adds before they are. bytes_per_token_in_window: what a token adds while every layer keeps it.
    bytes_per_sequence: what a sequence of the planned context holds (blocks rounded, windows and state counted).
    bytes_total = k_bytes + v_bytes + state_bytes: of all planned sequences. rank: the same on the fullest rank.
    """

    bytes_per_token: int
    bytes_per_sequence: int
    bytes_total: int
    k_bytes: int
    v_bytes: int
    state_bytes: int
    bytes_per_token_in_window: int
    k_format: str
    v_format: str
    rank: RankKV


@dataclass(frozen=True, slots=True)
class WeightFigures:
    """bytes: of the whole model, as stored or published. rank_bytes: as the fullest rank holds them once loaded.
    parameters: None where they cannot be counted. active: a token's own (MoE)."""

    bytes: int
    parameters: int | None
    active_parameters: int | None
    format: str
    rank_bytes: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits into the cache's memory of one replica, counted as the engine counts. None: memory not known.

    max_context: the longest context that the planned number of sequences can all have. concurrency: sequences of the
    planned context at once (a fraction where the engine prints one).
    """

    blocks: int | None = None
    block_tokens: int | None = None
    tokens: int | None = None
    max_context: int | None = None
    concurrency: float | None = None


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """Decode at one batch size: lower bound of a step, tokens of all sequences a second, what binds, whether it
    fits."""

    batch: int
    step_s: float
    tokens_per_s: float
    bound_by: str
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Times:
    """prefill_s: one prompt of the planned context; decode_s_per_token: one step of the planned batch, which gives each
    sequence a token. `basis` says whether these are limits ('roofline') or include Kvarn's measured overheads
    ('predicted'). None: the device's figures are not known. bound_by: of decode."""

    prefill_s: float | None = None
    decode_s_per_token: float | None = None
    bound_by: str | None = None
    prefill_bound_by: str | None = None
    tokens_per_s: float | None = None
    prefill_flops: float | None = None
    decode_flops: float | None = None
    decode_weight_bytes: int | None = None
    decode_kv_bytes: int | None = None
    basis: str = "roofline"
    batches: tuple[BatchPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same spec. shape: in words. bytes_per_token: of all its layers, on one device."""

    kind: str
    layers: int
    shape: str
    bytes_per_token: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where everything came from, and what was assumed."""

    model: str
    hardware: str
    engine: str
    kvarn: str
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """The device and what its terms leave: sum(terms) + free_bytes = memory_bytes (free may be negative)."""

    name: str
    memory_bytes: int
    count: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a model's cache costs on a device, decided before anything is loaded. All bytes are integers.

    verdict: fits | does_not_fit | unknown; reason: one sentence with the numbers. model, architecture, context,
    sequences, batch, tp, pp, dp: what was planned. model_context: tokens the model was made for. terms: one device's
    memory, additive. process_bytes: of all terms but what is left to others, the peak of a process that holds the
    planned sequences. cache_bytes: memory the engine leaves for its cache on one device, [cache_low, cache_high] over
    the range of the estimates; None where unknown. lines: what the engine would log. `to_json` and `from_json` are
    inverse.
    """

    verdict: Verdict
    reason: str
    model: str
    architecture: str
    engine: str
    context: int
    model_context: int | None
    sequences: int
    batch: int
    tp: int
    pp: int
    dp: int
    kv: KVFigures
    weights: WeightFigures
    capacity: Capacity
    time: Times
    terms: tuple[Term, ...]
    process_bytes: int
    provenance: Provenance
    device: DeviceFigures | None = None
    cache_bytes: int | None = None
    cache_low: int | None = None
    cache_high: int | None = None
    cache_how: str = ""
    groups: tuple[LayerGroup, ...] = ()
    details: tuple[tuple[str, str], ...] = ()
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 fits, 1 does not fit, 2 cannot tell."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Raises InvalidRequest for a dict that is not a plan."""
        if not isinstance(data, dict):
            raise InvalidRequest("this is not a plan: not an object", fixes=("write it with Plan.to_json",))
        try:
            return _build(cls, data)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"this is not a plan: {error}", fixes=("write it with Plan.to_json",)) from error

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises InvalidRequest."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidRequest(f"this is not JSON: {error}") from error
        return cls.from_dict(data)


def _build(kind: Any, value: Any) -> Any:
    """A value of type `kind` from plain JSON data."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        if value is None:
            return None
        return _build(next(k for k in get_args(kind) if k is not type(None)), value)
    if origin is tuple:
        kinds = get_args(kind)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            return tuple(_build(kinds[0], v) for v in value)
        return tuple(_build(k, v) for k, v in zip(kinds, value, strict=True))
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        names = {f.name for f in fields(kind)}
        if unknown := set(value) - names:
            raise KeyError(f"unknown names {sorted(unknown)}")
        return kind(**{n: _build(hints[n], v) for n, v in value.items()})  # type: ignore[operator]
    if kind is float and isinstance(value, int):
        return float(value)
    return value
