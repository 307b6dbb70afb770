"""Tensors of a GGUF file under their Hugging Face names, dequantized by the `gguf` package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from torch import Tensor

from kvarn.core.errors import ModelError, UnknownArchitecture
from kvarn.core.gguf_header import GGUFHeader, GGUFTensor
from kvarn.models.weights._ggml import FLOATS, QUANTIZED, decode, decode_into
from kvarn.models.weights.base import RawBlocks

REORDERED = "llama"  # the GGUF architecture whose converter reorders query and key rows


class GGUFSource:
    """Reads through memory maps, a tensor at a time, in chunks of rows.

    headers: one, or the shards' in order. The converter of GGUF's llama reorders the rows of each query and key head
    from two halves to interleaved pairs (`LlamaModel.permute` of convert_hf_to_gguf.py); query_heads and kv_heads are
    needed to put them back.
    """

    norms_include_one = True  # the converter adds it for Gemma

    def __init__(self, headers: Sequence[GGUFHeader], query_heads: int, kv_heads: int) -> None:
        first = headers[0]
        self.provenance = str(first.path)
        self._names = _name_map(first)
        self._tensors = {t.name: (header, t) for header in headers for t in header.tensors.values()}
        self._files = {header.path: np.memmap(header.path, np.uint8, mode="c").view(np.ndarray) for header in headers}
        reordered = first.architecture == REORDERED
        self._heads = {"q_proj": query_heads, "k_proj": kv_heads} if reordered else {}

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self._tensors.get(self._there(name))
        return found[1].shape if found else None

    def read(self, name: str, out: Tensor) -> None:
        tensor, data = self._rows(name)
        if heads := self._heads_of(name):
            each = len(data) // heads
            halves = out.unflatten(0, (heads, 2, each // 2))
            for head in range(heads):
                pairs = decode(tensor.type, data[head * each : (head + 1) * each]).unflatten(0, (each // 2, 2))
                halves[head].copy_(pairs.transpose(0, 1).reshape(halves[head].shape))
            return
        decode_into(out if out.dim() > 1 else out.view(len(data), -1), tensor.type, data)

    def raw(self, name: str) -> RawBlocks | None:
        tensor, data = self._rows(name)
        if tensor.type in FLOATS:
            return None
        blocks = torch.from_numpy(data)
        if heads := self._heads_of(name):
            blocks = blocks.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(blocks.shape)
        return RawBlocks(tensor.type, blocks)

    def vector(self, gguf_name: str) -> list[float]:
        """A small float tensor by its name in the file, such as rope_freqs.weight. Raises ModelError."""
        if gguf_name not in self._tensors:
            raise ModelError(f"{self.provenance}: tensor {gguf_name} is missing", fixes=("fetch the model again",))
        header, tensor = self._tensors[gguf_name]
        return decode(tensor.type, self._bytes(header, tensor)).flatten().tolist()

    def _there(self, name: str) -> str:
        return self._names.get_name(name, try_suffixes=(".weight", ".bias")) or name

    def _heads_of(self, name: str) -> int:
        return self._heads.get(name.split(".")[-2], 0)

    def _rows(self, name: str) -> tuple[GGUFTensor, np.ndarray]:
        header, tensor = self._tensors[self._there(name)]
        return tensor, self._bytes(header, tensor)

    def _bytes(self, header: GGUFHeader, tensor: GGUFTensor) -> np.ndarray:
        """[rows, bytes a row]; a tensor of one dimension has a number a row, or is one row if it is quantized."""
        if tensor.type not in FLOATS and tensor.type not in QUANTIZED:
            known = ", ".join((*FLOATS, *sorted(QUANTIZED)))
            raise ModelError(
                f"{self.provenance}: tensor {tensor.name} has type {tensor.type}, which is not supported",
                fixes=(f"use a file whose tensors are of: {known}",),
            )
        rows = tensor.shape[0] if tensor.shape[1:] or tensor.type in FLOATS else 1
        start = tensor.offset_bytes
        return self._files[header.path][start : start + tensor.nbytes].reshape(rows, -1)


def _name_map(header: GGUFHeader) -> TensorNameMap:
    architectures = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    if header.architecture not in architectures:
        raise UnknownArchitecture(f"{header.path}: GGUF architecture {header.architecture!r} is not known")
    return get_tensor_name_map(architectures[header.architecture], int(header.get("block_count", 0)))
