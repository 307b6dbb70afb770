"""Public models and devices as data: one JSON file a family, one entry a line, each with its source.

Nothing is read at import; the first question reads the files (about 200 kB, some milliseconds).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvarn.core.errors import UnknownName

# What people append to a name without meaning another geometry.
_SUFFIX = re.compile(r"-(instruct|chat|it|hf|base|pt|thinking|text|bf16|fp16|gguf|preview)$")
_PREFIX = re.compile(r"^(meta-|nvidia-)")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of the catalogue. hub: its id on the Hugging Face hub. also: other names. source: where the figures come
    from. config: the values of its config.json that decide geometry. weights: format of the published weights, ''
    where they are of the config's own type. note: what is not certain about it."""

    name: str
    hub: str
    also: tuple[str, ...]
    source: str
    config: Mapping[str, Any]
    weights: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """An accelerator or processor. flops: dense FLOP/s by number type. link_bytes_per_s: to its peers, one direction.
    accelerator: False for a CPU, whose memory is what one socket takes at most."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float | None
    flops: Mapping[str, float]
    link_bytes_per_s: float | None
    also: tuple[str, ...]
    accelerator: bool
    source: str
    note: str = ""


def normalise(name: str) -> str:
    """One spelling of a model's name: 'meta-llama/Llama-3.1-8B-Instruct', 'llama3.1:8b' -> 'llama3.18b'."""
    found = re.sub(r"[\s_:]+", "-", name.strip().lower().rsplit("/", 1)[-1])
    found = _PREFIX.sub("", found)
    while shorter := _SUFFIX.sub("", found):
        if shorter == found:
            break
        found = shorter
    return re.sub(r"[^a-z0-9.]", "", found)


def model_names() -> tuple[str, ...]:
    """Names of the catalogue's models, family by family."""
    return tuple(_models())


def model_entries() -> tuple[ModelEntry, ...]:
    return tuple(_models().values())


def find_model(name: str) -> ModelEntry | None:
    """The entry that `name` means, whatever its spelling, or None."""
    return _models().get(_spellings().get(normalise(name), ""))


def load_model(name: str) -> ModelEntry:
    """The entry that `name` means. Raises UnknownName with the nearest names."""
    if found := find_model(name):
        return found
    raise UnknownName("model", name, model_names())


def device_entries() -> tuple[DeviceEntry, ...]:
    """Every device of the catalogue, maker by maker."""
    return tuple(_devices().values())


def find_device_entry(name: str) -> DeviceEntry | None:
    """The device that `name` means, whatever its spelling ('NVIDIA H100', 'rtx4090', 'A100-SXM-80GB'), or None."""
    return _devices().get(_device_spellings().get(_normalise_device(name), ""))


def _normalise_device(name: str) -> str:
    found = re.sub(r"\b(nvidia|amd|intel|apple|google|aws|geforce|radeon|instinct|tesla|platinum)\b", "", name.lower())
    return re.sub(r"[^a-z0-9+]", "", found)


@cache
def _devices() -> Mapping[str, DeviceEntry]:
    return {name: _device_entry(name, e) for content in _contents("devices") for name, e in content["devices"].items()}


def _device_entry(name: str, entry: Mapping[str, Any]) -> DeviceEntry:
    return DeviceEntry(
        name=name,
        memory_bytes=entry["memory_bytes"],
        bandwidth_bytes_per_s=entry.get("bandwidth_bytes_per_s"),
        flops=entry["flops"],
        link_bytes_per_s=entry.get("link_bytes_per_s"),
        also=tuple(entry.get("also", ())),
        accelerator=entry.get("accelerator", True),
        source=entry["source"],
        note=entry.get("note", ""),
    )


@cache
def _device_spellings() -> Mapping[str, str]:
    aliases = {_normalise_device(other): e.name for e in _devices().values() for other in e.also}
    return aliases | {_normalise_device(name): name for name in _devices()}


@cache
def _models() -> Mapping[str, ModelEntry]:
    return {entry.name: entry for entry in _read_models()}


@cache
def _spellings() -> Mapping[str, str]:
    """Every normalised name, hub id and alias -> the entry's name; a model's own name wins over another's alias."""
    found: dict[str, str] = {}
    for entry in _models().values():
        for other in (entry.hub, *entry.also):
            found.setdefault(normalise(other), entry.name)
    return found | {normalise(name): name for name in _models()}


def _read_models() -> Iterator[ModelEntry]:
    for content in _contents("models"):
        for name, entry in content["models"].items():
            yield ModelEntry(
                name=name,
                hub=entry["hub"],
                also=tuple(entry.get("also", ())),
                source=content["sources"][entry["source"]],
                config=entry["config"],
                weights=entry.get("weights", ""),
                note=entry.get("note", ""),
            )


def _contents(folder: str) -> Iterator[Mapping[str, Any]]:
    directory = files("kvarn.planner.catalogue").joinpath(folder)
    for path in sorted(directory.iterdir(), key=lambda p: p.name):
        if path.name.endswith(".json"):
            yield json.loads(path.read_text("utf-8"))
