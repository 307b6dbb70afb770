"""Read an engine's start-up log and say, term by term, what agrees with a plan and what does not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvarn.planner.case import Case, replica_sequences
from kvarn.planner.profiles.base import Figure
from kvarn.planner.report import table
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import GIB, KIB, MIB

_UNITS = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "GB": GIB, "MB": MIB, "B": 1}  # these engines write GB and mean GiB
_NUMBER = r"([\d,]+(?:\.\d+)?)"
_SIZE = rf"{_NUMBER}\s*([GMK]i?B)"

# name of the figure -> patterns; the first group is the number, a second one its unit.
PATTERNS: dict[str, tuple[str, ...]] = {
    "blocks": (
        rf"# GPU blocks:\s*{_NUMBER}",
        rf"num_gpu_blocks[^\d]*{_NUMBER}",
        rf"blocks in KV cache primary pool:\s*{_NUMBER}",
        rf"primary blocks:\s*{_NUMBER}",
    ),
    "cpu_blocks": (rf"# CPU blocks:\s*{_NUMBER}",),
    "tokens": (
        rf"GPU KV cache size:\s*{_NUMBER} tokens",
        rf"#tokens:\s*{_NUMBER}",
        rf"for max tokens in paged KV cache \({_NUMBER}\)",
        rf"KV cache token capacity (?:is|will be set to)\s*{_NUMBER}",
    ),
    "concurrency": (rf"Maximum concurrency for [\d,]+ tokens per request:\s*{_NUMBER}x",),
    "concurrency_length": (rf"Maximum concurrency for {_NUMBER} tokens",),
    "available": (
        rf"Available KV cache memory:\s*{_SIZE}",
        rf"available KV cache memory \({_SIZE}\)",
        rf"reserved for KV Cache is\s*{_SIZE}",
    ),
    "needed": (rf"\({_SIZE} KV cache is needed",),
    "estimated_length": (rf"estimated maximum model length is\s*{_NUMBER}",),
    "needed_length": (rf"max seq len \({_NUMBER}\)",),
    "block_tokens": (rf"[Ss]etting attention block size to\s*{_NUMBER}", rf"tokens_per_block[^\d]*{_NUMBER}"),
    "k": (rf"\bK size:\s*{_SIZE}",),
    "v": (rf"\bV size:\s*{_SIZE}",),
    "kv": (rf"\bKV size:\s*{_SIZE}", rf"Allocated {_SIZE} for max tokens", rf"KVCache:\s*{_SIZE}"),
    "slots": (rf"max_mamba_cache_size:\s*{_NUMBER}",),
    "conv_state": (rf"conv_state size:\s*{_SIZE}",),
    "ssm_state": (rf"ssm_state size:\s*{_SIZE}",),
    "required_kv": (rf'memory\.required\.kv="?{_SIZE}',),
    "weights": (rf"(?:[Mm]odel loading took|weights take|Model weights take)\s*{_SIZE}",),
    "activations": (rf"(?:peak activation memory|activation peak memory takes)[^\d]*{_SIZE}",),
    "graphs": (rf"Graph capturing finished in [\d.]+ secs, took\s*{_SIZE}",),
}
_INPUTS = frozenset({"concurrency_length", "needed_length", "slots", "sequences", "streams", "available"})
_LLAMA_KV = re.compile(
    rf"llama_kv_cache\w*:\s*(?:\S+\s+)?size\s*=\s*{_NUMBER} MiB \(\s*(\d+) cells,\s*(\d+) layers,\s*(\d+)/"
    rf"\s*(\d+) seqs\), K \((\w+)\):\s*{_NUMBER} MiB, V \((\w+)\):\s*{_NUMBER} MiB"
)
_LLAMA_STATE = re.compile(
    rf"llama_memory_recurrent:\s*size\s*=\s*{_NUMBER} MiB \(\s*(\d+) cells.*?R \(f32\):"
    rf"\s*{_NUMBER} MiB, S \(f32\):\s*{_NUMBER} MiB"
)
_LLAMA_OLD = re.compile(
    rf"(?:llama_kv_cache_init|llama_new_context\w*|llama_kv_cache):.*?KV (?:self )?size\s*=\s*{_NUMBER} MiB"
)


_MARKS = {
    "ollama": r"memory\.required\.kv|ollama",
    "llama.cpp": r"llama_(?:kv_cache|memory_recurrent|new_context|model_load)",
    "tensorrt-llm": r"\[TensorRT-LLM\]|KV cache primary pool|max tokens in paged KV cache",
    "sglang": r"KV Cache is allocated|\bsglang\b",
    "vllm": r"\bvllm\b|GPU KV cache size|# GPU blocks|Available KV cache memory|KV cache is needed",
}


@dataclass(frozen=True, slots=True)
class Logged:
    """One figure of a log: value in units of `unit` (bytes for sizes), what half a unit of its last digit is worth."""

    name: str
    value: float
    half_step: float
    text: str


@dataclass(frozen=True, slots=True)
class Compared:
    """A logged figure beside the computed one. agrees: within half a unit of the log's last digit; where the memory
    that the engine had is itself printed rounded, a figure derived from it agrees within that rounding."""

    name: str
    logged: float
    computed: float | None
    agrees: bool | None
    text: str


def _half(digits: str) -> float:
    decimals = len(digits.split(".")[1]) if "." in digits else 0
    return 0.5 * 10.0**-decimals


def read_figure(name: str, digits: str, unit: str | None = None) -> Logged:
    """A printed number. '38.6', 'GiB' has a half step of 0.05 GiB; a whole count has none."""
    scale = _UNITS.get(unit or "", 1)
    plain = digits.replace(",", "")
    half = _half(plain) * scale if unit or "." in plain else 0.0
    return Logged(name, float(plain) * scale, half, f"{digits}{' ' + unit if unit else ''}")


def engine_of_log(text: str) -> str | None:
    """The engine that wrote a log, with its release where the log says it; None where nothing tells."""
    if release := re.search(r"LLM engine \(v(\d+\.\d+(?:\.\d+)?)", text):
        return f"vllm@{release[1]}"
    return next((name for name, mark in _MARKS.items() if re.search(mark, text)), None)


def parse_log(text: str) -> dict[str, Logged]:
    """The figures of a log, the last one of each name. Unknown lines are passed over."""
    found: dict[str, Logged] = {}
    for name, patterns in PATTERNS.items():
        for pattern in patterns:
            for match in re.finditer(pattern, text):
                groups = match.groups()
                found[name] = read_figure(name, groups[0], groups[1] if len(groups) > 1 else None)
    return found | _llama(text)


def _llama(text: str) -> dict[str, Logged]:
    """llama.cpp's own lines; several caches (full and window) are added up and kept apart."""
    found: dict[str, Logged] = {}
    caches = list(_LLAMA_KV.finditer(text))
    if caches:
        for name, group in (("kv", 1), ("k", 7), ("v", 9)):
            value = sum(float(m[group].replace(",", "")) for m in caches) * MIB
            found[name] = Logged(name, value, 0.005 * MIB * len(caches), f"{value / MIB:.2f} MiB")
        for name, m in zip(("full", "window"), caches, strict=False):
            found[name] = read_figure(name, m[1], "MiB")
            found["cells" if name == "full" else "window_cells"] = read_figure("cells", m[2])
        found["sequences"], found["streams"] = (
            read_figure("sequences", caches[0][4]),
            read_figure("streams", caches[0][5]),
        )
    elif old := _LLAMA_OLD.search(text):
        found["kv"] = read_figure("kv", old[1], "MiB")
    if state := _LLAMA_STATE.search(text):
        found["state"] = read_figure("state", state[1], "MiB")
        found["conv_state"], found["ssm_state"] = (
            read_figure("conv_state", state[3], "MiB"),
            read_figure("ssm_state", state[4], "MiB"),
        )
    return found


def available_range(logged: dict[str, Logged]) -> tuple[int, int, int] | None:
    """Memory the engine had for its cache: the printed value and the range it was rounded from."""
    figure = logged.get("available")
    if figure is None:
        return None
    return int(figure.value), int(figure.value - figure.half_step), int(figure.value + figure.half_step)


def compare_log(case: Case, logged: dict[str, Logged]) -> tuple[Compared, ...]:
    """Term by term. Raises nothing: what the plan has no figure for is left open (agrees None)."""
    figures, source = _figures(case, logged)
    found = []
    for name, figure in logged.items():
        if name in _INPUTS or name == source:
            continue
        if name == "weights":
            found.append(_compare_weights(case, figure))
            continue
        computed = figures[0].get(name)
        ends = [f[name].value for f in figures[1:] if name in f]
        agrees = None if computed is None else _agrees(figure, [computed.value, *ends])
        found.append(Compared(name, figure.value, computed.value if computed else None, agrees, figure.text))
    return tuple(found)


def _compare_weights(case: Case, figure: Logged) -> Compared:
    weights = case.stage_weights[0]
    if weights.certainty == "unknown":
        return Compared(figure.name, figure.value, None, None, figure.text)
    return Compared(figure.name, figure.value, weights.bytes, _agrees(figure, [weights.low, weights.high]), figure.text)


def _agrees(logged: Logged, computed: Sequence[float]) -> bool:
    slack = logged.half_step + (1e-6 if logged.half_step else 0.0)
    return min(computed) - slack <= logged.value <= max(computed) + slack


def _figures(case: Case, logged: dict[str, Logged]) -> tuple[list[dict[str, Figure]], str]:
    """The engine's figures for the memory it had, in the middle and at both ends of the range that was printed. Where
    the log prints no memory they follow from the blocks or tokens that it counts; that figure's name comes back, since
    it then proves nothing."""
    room = available_range(logged)
    if room is None and "tokens" in logged and case.stages[0].figures_at(1):
        found = [case.stages[0].figures_at(int(logged["tokens"].value))] * 3
        return [{f.name: f for f in figures} for figures in found], "tokens"
    source = ""
    if room is None:
        source = next((n for n in ("blocks", "tokens") if n in logged), "")
        room = _implied(case, logged[source], source) if source else (0, 0, 0)
    cache = min(case.stages, key=lambda c: c.tokens(room[0]))
    return [{f.name: f for f in cache.figures(r)} for r in room], source


def _implied(case: Case, target: Logged, source: str) -> tuple[int, int, int]:
    """The least and the most memory for which the engine would count just so many blocks or tokens."""
    cache = case.stages[0]
    count = cache.blocks if source == "blocks" else cache.tokens

    def first(reached: float) -> int:
        low, high = 0, 2**50
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if (count(middle) or 0) < reached else (low, middle)
        return low

    low = first(target.value)
    return low, low, max(low, first(target.value + 1) - 1)


def settings_from_log(settings: Settings, logged: dict[str, Logged]) -> Settings:
    """Settings with what the log itself states: request length, slots, sequences, block size."""
    found: dict[str, Any] = {}
    length = logged.get("concurrency_length") or logged.get("needed_length")
    if length:
        found["context_tokens"] = int(length.value)
    if "slots" in logged:
        found["slots"] = int(logged["slots"].value)
    if "streams" in logged and "cells" in logged:
        sequences, streams = int(logged["sequences"].value), int(logged["streams"].value)
        found |= {"sequences": sequences, "unified": streams == 1 and sequences > 1}
        found["context_tokens"] = max(1, int(logged["cells"].value) // (1 if streams == sequences else sequences))
    return replace(settings, **found)


def log_report(found: tuple[Compared, ...], case: Case) -> list[str]:
    """The comparison as a table, and a verdict line."""
    rows = [("figure", "log", "computed", "")]
    for c in found:
        said = "agrees" if c.agrees else "not computed" if c.agrees is None else "DIFFERS"
        rows.append((c.name, c.text, _show(c), said))
    judged = [c for c in found if c.agrees is not None]
    bad = [c.name for c in judged if not c.agrees]
    if not found:
        return ["no figure of a KV cache was found in this log"]
    head = f"{len(judged) - len(bad)} of {len(judged)} figures agree with the log"
    head += f"; {', '.join(bad)} differ" if bad else ""
    per = replica_sequences(case.settings)
    load = f"{per} sequence{'s' * (per != 1)} of {case.settings.context_tokens:,} tokens"
    return [f"{head} ({case.profile.name}, {load})", *table(rows)]


def _show(c: Compared) -> str:
    if c.computed is None:
        return ""
    unit = next((u for u in _UNITS if f" {u}" in c.text), None)
    if unit:
        digits = len(c.text.split()[0].split(".")[1]) if "." in c.text else 0
        return f"{c.computed / _UNITS[unit]:,.{digits}f} {unit}"
    return f"{c.computed:,.2f}" if "." in c.text else f"{c.computed:,.0f}"
