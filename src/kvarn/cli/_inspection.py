"""What `kvarn inspect` knows of a model: read from headers and configs, weights untouched. No torch."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.core.errors import ModelError
from kvarn.core.files import ModelFiles
from kvarn.core.formats import KVFormat, parse_kv_format
from kvarn.core.geometry import ModelGeometry, geometry_of
from kvarn.core.gguf_config import config_from_gguf
from kvarn.core.gguf_header import read_gguf_header
from kvarn.core.specs import GroupSpec, LayerKind, LayerSpec

MAX_SAFETENSORS_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class GroupCost:
    """What one group of equal layers stores. factors: the product that gives bytes_per_token, written out."""

    group: GroupSpec
    attention: str
    factors: str
    bytes_per_token: int | float

    @property
    def window_tokens(self) -> int | None:
        return self.group.spec.window_tokens or self.group.spec.chunk_tokens


@dataclass(frozen=True, slots=True)
class Inspection:
    """weights: bytes by type as stored, largest first. format: the KV format that the costs are in."""

    files: ModelFiles
    geometry: ModelGeometry
    format: KVFormat
    block_size: int
    groups: tuple[GroupCost, ...]
    weights: Mapping[str, int]

    @property
    def bytes_per_token(self) -> int | float:
        """What a token adds while every layer still holds it."""
        return sum(cost.bytes_per_token for cost in self.groups)

    @property
    def state_bytes(self) -> int:
        return sum(spec.state_bytes for spec in self.geometry.layers)

    def kv_bytes(self, tokens: int) -> int:
        """Of one sequence of so many tokens, windows respected, blocks not rounded up, recurrent state included."""
        held = (cost.bytes_per_token * min(tokens, cost.window_tokens or tokens) for cost in self.groups)
        return round(sum(held)) + self.state_bytes

    def as_dict(self) -> dict[str, Any]:
        geometry = self.geometry
        return {
            "model": self.files.name,
            "kind": self.files.kind,
            "path": str(self.files.path),
            "architecture": geometry.architecture,
            "hidden_size": geometry.hidden_size,
            "vocab_size": geometry.vocab_size,
            "max_context": geometry.max_context,
            "parameters": geometry.parameters.total if geometry.parameters else None,
            "layers": {
                "total": len(geometry.layers),
                "by_kind": {kind: len(list(found)) for kind, found in _by_kind(geometry.layers)},
            },
            "kv": {
                "format": self.format.name,
                "block_size": self.block_size,
                "bytes_per_token": self.bytes_per_token,
                "state_bytes": self.state_bytes,
                "bytes_at_max_context": self.kv_bytes(geometry.max_context) if geometry.max_context else None,
                "groups": [_group_dict(cost) for cost in self.groups],
            },
            "weights": {"bytes": sum(self.weights.values()), "by_type": dict(self.weights)},
            "notes": list(geometry.notes),
        }


def inspect_model(files: ModelFiles, kv: str | None, block_size: int) -> Inspection:
    """kv: a KV format; None: the model's own precision. Raises ModelError, UnknownArchitecture, UnknownName."""
    config, weights = _gguf(files) if files.kind == "gguf" else _directory(files)
    geometry = geometry_of(config, name=files.name, provenance=str(files.path))
    kv_format = parse_kv_format(kv or geometry.dtype)
    groups = tuple(group_cost(group, kv_format, block_size) for group in geometry.groups)
    ordered = dict(sorted(weights.items(), key=lambda item: -item[1]))
    return Inspection(files, geometry, kv_format, block_size, groups, ordered)


def group_cost(group: GroupSpec, kv_format: KVFormat, block_size: int) -> GroupCost:
    """Bytes a token of a group, counted from the format's own layout: a block's bytes over its tokens."""
    spec, count = group.spec, len(group.layers)
    if spec.kind is LayerKind.LATENT:
        # One row a token, without heads; formats cut it like a key.
        per_layer = kv_format.k.k_block_bytes(spec.elements_per_token, block_size) / block_size
        elements = f"({spec.latent_dim} latent + {spec.rope_dim} rope{_index(spec)})"
    else:
        per_head = kv_format.block_bytes(spec.k_dim, spec.v_dim, block_size) / block_size
        per_layer = per_head * spec.kv_heads
        elements = f"{spec.kv_heads} KV heads x {_dims(spec)}"
        if spec.index_dim:
            per_layer += kv_format.k.k_block_bytes(spec.index_dim, block_size) / block_size
            elements = f"({elements}{_index(spec)})"
    total = _whole(per_layer * count)
    width = _whole(per_layer / spec.elements_per_token)
    return GroupCost(group, _attention(spec), f"{count} layers x {elements} x {width:g} bytes = {total:,}", total)


def _index(spec: LayerSpec) -> str:
    return f" + {spec.index_dim} index" if spec.index_dim else ""


def _dims(spec: LayerSpec) -> str:
    if spec.k_dim == spec.v_dim:
        return f"2 (K and V) x {spec.k_dim} head dim"
    return f"({spec.k_dim} K + {spec.v_dim} V)"


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _attention(spec: LayerSpec) -> str:
    """MHA, GQA, MQA or MLA, with the heads."""
    if spec.kind is LayerKind.LATENT:
        return "MLA"
    name = "MHA" if spec.kv_heads == spec.query_heads else "MQA" if spec.kv_heads == 1 else "GQA"
    return f"{name}, {spec.query_heads} query heads over {spec.kv_heads} KV heads" if spec.query_heads else name


def layer_kind(spec: LayerSpec) -> str:
    """A layer's kind in words that tell windows apart."""
    if spec.window_tokens is not None:
        return f"{spec.kind}, window {spec.window_tokens}"
    return f"{spec.kind}, chunks of {spec.chunk_tokens}" if spec.chunk_tokens is not None else str(spec.kind)


def _by_kind(layers: Iterable[LayerSpec]) -> Iterator[tuple[str, Iterator[str]]]:
    return itertools.groupby(sorted(layer_kind(spec) for spec in layers))


def _group_dict(cost: GroupCost) -> dict[str, Any]:
    spec = cost.group.spec
    return {
        "kind": layer_kind(spec),
        "attention": cost.attention,
        "layers": list(cost.group.layers),
        "query_heads": spec.query_heads,
        "kv_heads": spec.kv_heads,
        "k_dim": spec.k_dim,
        "v_dim": spec.v_dim,
        "latent_dim": spec.latent_dim,
        "rope_dim": spec.rope_dim,
        "index_dim": spec.index_dim,
        "window_tokens": cost.window_tokens,
        "factors": cost.factors,
        "bytes_per_token": cost.bytes_per_token,
    }


def _gguf(files: ModelFiles) -> tuple[dict[str, Any], dict[str, int]]:
    headers = [read_gguf_header(path) for path in files.weights]
    return config_from_gguf(headers[0]), _summed(header.bytes_by_type() for header in headers)


def _directory(files: ModelFiles) -> tuple[dict[str, Any], dict[str, int]]:
    path = files.path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    return config, _summed(safetensors_bytes(path) for path in files.weights) or _index_bytes(files.path)


def _index_bytes(directory: Path) -> dict[str, int]:
    """What the safetensors index states, where only the config was fetched; empty if there is no index."""
    path = directory / "model.safetensors.index.json"
    stated = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    total = stated.get("metadata", {}).get("total_size")
    return {"by the index": int(total)} if total else {}


def safetensors_bytes(path: Path) -> dict[str, int]:
    """Bytes by dtype, from the header of a safetensors file. Raises ModelError."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_SAFETENSORS_HEADER_BYTES:
                raise ValueError(f"a header of {length:,} bytes")
            header = json.loads(stream.read(length))
        tensors = [value for name, value in header.items() if name != "__metadata__"]
        spans = [(tensor["dtype"], *tensor["data_offsets"]) for tensor in tensors]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a safetensors file: {error}") from error
    return _summed({dtype: end - begin} for dtype, begin, end in spans)


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for name, nbytes in itertools.chain.from_iterable(count.items() for count in counts):
        total[name] = total.get(name, 0) + nbytes
    return total
