"""A geometry from whatever names a model: a catalogue or short name, a hub id, a config.json, a directory, a GGUF."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvarn.core.errors import ConfigError, FetchError, ModelError, UnknownName
from kvarn.core.geometry import ModelGeometry, geometry_from_factors, geometry_of
from kvarn.core.gguf_config import config_from_gguf
from kvarn.core.gguf_header import read_gguf_header, shard_paths
from kvarn.planner.catalogue import ModelEntry, find_model
from kvarn.planner.catalogue import model_names as catalogue_names

__all__ = ["geometry_from_factors", "load_geometry", "model_names", "read_config", "stored_bytes"]

INDEX = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 64 << 20
MAX_SAFETENSORS_HEADER_BYTES = 100 << 20


def load_geometry(source: str, *, fetch: bool = True) -> ModelGeometry:
    """The geometry of the model that `source` names; weights are not read.

    In this order: a path that exists (config.json, model directory, .gguf), a catalogue name in any spelling (hub ids
    of catalogued models included: nothing is fetched), a short name (its file if it is here), a hub id (config and
    index only; `fetch` allows the network). Raises UnknownName with the nearest names, ModelError and its kinds,
    FetchError.
    """
    path = Path(source).expanduser()
    if path.exists():
        return _from_path(path, source)
    if entry := find_model(source):
        return _with_stored_file(source, _from_catalogue(entry))
    if source.endswith((".gguf", ".json")) or source.startswith((".", "/", "~")):
        raise ModelError(f"{source} does not exist", fixes=("check the path", "kvarn plan --list-models"))
    return _from_hub(source, fetch)


def model_names() -> tuple[str, ...]:
    """Names that need no file and no network: the catalogue's, then short names that are not among them."""
    from kvarn.hub.names import short_names  # noqa: PLC0415  (the table of short names is read only when asked for)

    listed = catalogue_names()
    return (*listed, *(n for n in short_names() if n not in listed and not find_model(n)))


def read_config(path: Path) -> Mapping[str, Any]:
    """A config.json. Raises ConfigError: too large, not JSON, not an object."""
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes; that is no config.json")
    try:
        found = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", fixes=("fetch the config again",)) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds {type(found).__name__}; a config is a JSON object")
    return found


def _from_path(path: Path, source: str) -> ModelGeometry:
    if path.is_dir():
        config = path / "config.json"
        if not config.exists():
            ggufs = sorted(path.glob("*.gguf"))
            if len(ggufs) == 1 or (ggufs and "-00001-of-" in ggufs[0].name):
                return _from_gguf(ggufs[0])
            raise ModelError(
                f"{path} has no config.json" + (f", but {len(ggufs)} GGUF files" if ggufs else ""),
                fixes=tuple(str(g) for g in ggufs[:4]) or ("give a model directory, a config.json or a .gguf",),
            )
        return _from_config(config, path.name, stored_bytes(path))
    if path.suffix == ".gguf" or _starts_like_gguf(path):
        return _from_gguf(path)
    return _from_config(path, path.parent.name if path.name == "config.json" else path.stem, ())


def _starts_like_gguf(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(4) == b"GGUF"


def _from_config(config: Path, name: str, weights: tuple[tuple[str, int], ...]) -> ModelGeometry:
    geometry = geometry_of(read_config(config), name=name, provenance=str(config))
    if not weights:
        return geometry
    return replace(geometry, weight_bytes=weights, provenance=f"{config} and the weights' index")


def _from_gguf(path: Path) -> ModelGeometry:
    header = read_gguf_header(path)
    totals: Counter[str] = Counter()
    for shard in shard_paths(path, header):
        totals.update((header if shard == path else read_gguf_header(shard)).bytes_by_type())
    geometry = geometry_of(config_from_gguf(header), name=path.stem, provenance=f"header of {path}")
    return replace(geometry, weight_bytes=tuple(sorted(totals.items())))


def _from_catalogue(entry: ModelEntry) -> ModelGeometry:
    geometry = geometry_of(entry.config, name=entry.name, provenance=f"catalogue: {entry.source} [{entry.hub}]")
    notes = (*geometry.notes, entry.note) if entry.note else geometry.notes
    return replace(geometry, weight_format=entry.weights or geometry.weight_format, notes=notes)


def _with_stored_file(source: str, geometry: ModelGeometry) -> ModelGeometry:
    """A short name means one file: where it has been fetched, its header is the truth, weights included."""
    from kvarn.hub import resolve, short_names  # noqa: PLC0415

    if source not in short_names():
        return geometry
    try:
        return replace(_from_gguf(resolve(source, fetch=False).path), name=source)
    except FetchError:
        return geometry


def _from_hub(source: str, fetch: bool) -> ModelGeometry:
    from kvarn.hub import fetch_config_only, resolve, short_names  # noqa: PLC0415  (imports huggingface_hub lazily)

    if source in short_names():
        return replace(_from_gguf(resolve(source, fetch=fetch).path), name=source)
    if source.count("/") != 1 or not fetch:
        raise UnknownName("model", source, model_names(), listed_by="kvarn plan --list-models")
    directory = fetch_config_only(source)
    geometry = _from_config(directory / "config.json", source, stored_bytes(directory))
    return replace(geometry, provenance=f"hub: {source}, revision {directory.name}")


def stored_bytes(directory: Path) -> tuple[tuple[str, int], ...]:
    """Exact weight bytes by type: from the safetensors files' headers, else from the index's total (type unstated).
    Empty where neither is there. Raises ModelError for a damaged header or index."""
    shards = sorted(p for p in directory.glob("*.safetensors") if not p.name.startswith("consolidated"))
    index = directory / INDEX
    if index.exists():
        listed = _index(index)
        names = set(listed.get("weight_map", {}).values())
        if names and all((directory / n).exists() for n in names):
            return _sum_headers([directory / n for n in sorted(names)])
        total = listed.get("metadata", {}).get("total_size")
        if isinstance(total, (int, float)) and total > 0:
            return (("as indexed", int(total)),)
    return _sum_headers(shards)


def _index(path: Path) -> Mapping[str, Any]:
    found = read_config(path)
    if not isinstance(found.get("weight_map", {}), dict) or not isinstance(found.get("metadata", {}), dict):
        raise ModelError(f"{path} is no safetensors index")
    return found


def _sum_headers(shards: list[Path]) -> tuple[tuple[str, int], ...]:
    totals: Counter[str] = Counter()
    for shard in shards:
        totals.update(_header_bytes(shard))
    return tuple(sorted(totals.items()))


def _header_bytes(path: Path) -> Counter[str]:
    """Bytes by type of one safetensors file: an 8-byte length, then JSON with each tensor's dtype and offsets."""
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 2 <= length <= min(MAX_SAFETENSORS_HEADER_BYTES, path.stat().st_size - 8):
            raise ModelError(f"{path}: a header of {length} bytes; the file is truncated or no safetensors file")
        try:
            tensors = json.loads(handle.read(length))
            spans = [(t["dtype"], t["data_offsets"]) for name, t in tensors.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{path}: the safetensors header is damaged", fixes=("fetch the file again",)) from error
    totals: Counter[str] = Counter()
    for dtype, (start, end) in spans:
        totals[dtype] += end - start
    return totals
