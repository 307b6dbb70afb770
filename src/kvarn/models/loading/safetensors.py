"""Tensors of a Hugging Face directory: one safetensors file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvarn.core.errors import ModelError
from kvarn.models.weights.base import RawBlocks

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class SafetensorsSource:
    """Reads through a memory map, a tensor at a time.

    Names are stripped of what stands before `model.` in models that also see (`language_model.model.` and
    `model.language_model.`), so that all speak the text model's names.
    """

    norms_include_one = False

    def __init__(self, files: Sequence[Path], provenance: str) -> None:
        if not files:
            raise ModelError(f"{provenance}: no safetensors files", fixes=("fetch the weights: kvarn pull",))
        self.provenance = provenance
        self._handles = tuple(_open(path) for path in files)

    @cached_property
    def _where(self) -> dict[str, tuple[Any, str]]:
        """Our name -> (open file, its name there)."""
        return {_text_name(name): (handle, name) for handle in self._handles for name in handle.keys()}  # noqa: SIM118

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self._where:
            return None
        handle, there = self._where[name]
        return tuple(handle.get_slice(there).get_shape())

    def read(self, name: str, out: Tensor) -> None:
        handle, there = self._where[name]
        dtype = handle.get_slice(there).get_dtype()
        if dtype not in FLOATS:
            raise ModelError(
                f"{self.provenance}: tensor {there} has type {dtype}", fixes=(f"known: {', '.join(sorted(FLOATS))}",)
            )
        out.copy_(handle.get_tensor(there))

    def raw(self, name: str) -> RawBlocks | None:
        return None


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing", fixes=("fetch the model again",)) from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a whole safetensors file ({error})", fixes=("fetch it again",)) from error


def _text_name(name: str) -> str:
    for prefix in ("language_model.", "model.language_model."):
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
    return name


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory, by its index where there is one. Raises ModelError."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return tuple(sorted(directory.glob("*.safetensors")))
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not a safetensors index", fixes=("fetch it again",)) from error
    return tuple(directory / name for name in sorted(names))
