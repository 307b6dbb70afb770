"""The header of a GGUF file: metadata and tensor infos, weights unread. No torch.

Large arrays (a tokenizer's vocabulary) are stepped over and read only when asked for, so the header of a model with
262,144 tokens takes some tens of milliseconds. Layout: the GGUF specification of ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from kvarn.core.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
EAGER_ARRAY_LENGTH = 1024
DEFAULT_ALIGNMENT = 32
MAX_TENSORS = 1 << 20
MAX_KEYS = 1 << 16
MAX_DIMS = 4
MAX_NAME_BYTES = 1 << 16
MAX_ELEMENTS = 1 << 48

_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_SCALAR_STRUCTS = {code: struct.Struct(text) for code, text in _SCALARS.items()}
_ARRAY_CODES = {code: text[1].replace("?", "B") for code, text in _SCALARS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

# ggml tensor types: id -> (name, elements a block, bytes a block); ggml.h and ggml-common.h of ggml-org/ggml.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


class GGUFError(ConfigError):
    """A file is not a GGUF, or its header is truncated, inconsistent or of absurd size."""


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """An array of the metadata that was stepped over. Read it with `GGUFHeader.array`."""

    element_type: int
    length: int
    offset_bytes: int

    def __len__(self) -> int:
        return self.length


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor. shape: row-major as in PyTorch and NumPy (the file's own order reversed). type: ggml's name.
    offset_bytes: from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset_bytes: int
    nbytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """metadata: scalars, strings, short arrays as tuples, long arrays as `GGUFArray`. tensors: by name, file order."""

    path: Path
    version: int
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, GGUFTensor] = field(repr=False)
    data_offset_bytes: int = 0

    @property
    def architecture(self) -> str:
        """The GGUF's own architecture name. Raises GGUFError where it is missing."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise GGUFError(f"{self.path}: no general.architecture in the metadata", fixes=("convert the model again",))
        return name

    @property
    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def bytes_by_type(self) -> dict[str, int]:
        """Exact weight bytes a ggml type, e.g. {'F32': 140544, 'Q8_0': 30081024}."""
        totals: dict[str, int] = {}
        for tensor in self.tensors.values():
            totals[tensor.type] = totals.get(tensor.type, 0) + tensor.nbytes
        return totals

    def get(self, suffix: str, default: Any = None) -> Any:
        """The metadata value `{architecture}.{suffix}`."""
        return self.metadata.get(f"{self.architecture}.{suffix}", default)

    def array(self, key: str) -> tuple[Any, ...] | array[Any]:
        """An array of the metadata in full: strings and short arrays as a tuple, long numeric arrays as array.array.
        Raises KeyError for an unknown key and GGUFError where the value is no array."""
        value = self.metadata[key]
        if isinstance(value, tuple):
            return value
        if not isinstance(value, GGUFArray):
            raise GGUFError(f"{self.path}: {key} is {type(value).__name__}, not an array")
        with _mapped(self.path) as buffer:
            return _Cursor(buffer, self.path, value.offset_bytes).elements(value.element_type, value.length)


def read_gguf_header(path: str | os.PathLike[str], *, header_only_file: bool = False) -> GGUFHeader:
    """Read metadata and tensor infos of the GGUF at `path`.

    header_only_file: the file holds no tensor data (the first bytes fetched from a hub), so tensors may point beyond
    its end. Raises GGUFError (not a GGUF, wrong version or byte order, truncated, absurd) and OSError.
    """
    path = Path(path)
    with _mapped(path) as buffer:
        cursor = _Cursor(buffer, path)
        version, n_tensors, n_keys = _preamble(cursor)
        metadata = _metadata(cursor, n_keys)
        infos = [_tensor_info(cursor) for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20 or alignment & (alignment - 1):
            raise cursor.error(f"general.alignment is {alignment!r}; it must be a power of two")
        data_offset = -(-cursor.at // alignment) * alignment
        tensors = _place(infos, data_offset, cursor, None if header_only_file else len(buffer))
    return GGUFHeader(path, version, metadata, tensors, data_offset)


def shard_paths(path: str | os.PathLike[str], header: GGUFHeader) -> tuple[Path, ...]:
    """All files of a split GGUF (`name-00001-of-00003.gguf`), or the one. Raises GGUFError where a shard is missing."""
    path = Path(path)
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return (path,)
    stem, mark, _ = path.name.rpartition(f"-of-{count:05d}.gguf")
    if not mark:
        raise GGUFError(f"{path}: one of {count} shards, but not named like NAME-00001-of-{count:05d}.gguf")
    found = tuple(path.with_name(f"{stem[:-5]}{i:05d}{mark}") for i in range(1, count + 1))
    if missing := [p.name for p in found if not p.exists()]:
        raise GGUFError(f"{path}: shard {missing[0]} is missing ({len(missing)} of {count})", fixes=("fetch it again",))
    return found


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as handle:
        if os.fstat(handle.fileno()).st_size < len(MAGIC):
            raise GGUFError(f"{path}: not a GGUF file (shorter than its 4-byte mark)")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            yield buffer


class _Cursor:
    """A checked reading position; every read beyond the end raises GGUFError."""

    def __init__(self, buffer: mmap.mmap, path: Path, at: int = 0) -> None:
        self.buffer, self.path, self.at, self.size = buffer, path, at, len(buffer)

    def error(self, what: str) -> GGUFError:
        return GGUFError(f"{self.path}: {what} (byte {self.at})", fixes=("fetch the file again",))

    def need(self, nbytes: int) -> int:
        """Take `nbytes`; returns where they start."""
        start = self.at
        if nbytes > self.size - start:
            raise self.error(f"truncated header: {nbytes} bytes wanted, {self.size - start} left")
        self.at = start + nbytes
        return start

    def u32(self) -> int:
        return _U32.unpack_from(self.buffer, self.need(4))[0]

    def u64(self) -> int:
        return _U64.unpack_from(self.buffer, self.need(8))[0]

    def string(self, limit: int | None = None) -> str:
        length = self.u64()
        if limit is not None and length > limit:
            raise self.error(f"a name of {length} bytes; at most {limit}")
        start = self.need(length)
        return self.buffer[start : start + length].decode("utf-8", "replace")

    def value(self, code: int) -> Any:
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            return self.array()
        if code not in _SCALAR_STRUCTS:
            raise self.error(f"unknown metadata type {code}")
        unpack = _SCALAR_STRUCTS[code]
        found = unpack.unpack_from(self.buffer, self.need(unpack.size))[0]
        # 1e-05 and not 9.999999747378752e-06: the decimal that was meant, as config.json has it
        return _shortest(found) if code == _FLOAT32 else found

    def array(self) -> tuple[Any, ...] | GGUFArray:
        code, length = self.u32(), self.u64()
        if code == _ARRAY:
            raise self.error("nested arrays are not supported")
        smallest = 8 if code == _STRING else self._width(code)
        if length * smallest > self.size - self.at:
            raise self.error(f"truncated header: an array of {length} elements does not fit in the file")
        if length <= EAGER_ARRAY_LENGTH:
            found = self.elements(code, length)
            return found if isinstance(found, tuple) else tuple(map(bool, found) if code == _BOOL else found)
        skipped = GGUFArray(code, length, self.at)
        self._skip(code, length)
        return skipped

    def elements(self, code: int, length: int) -> tuple[Any, ...] | array[Any]:
        if code == _STRING:
            return tuple(self.string() for _ in range(length))
        start = self.need(nbytes := length * self._width(code))
        found = array(_ARRAY_CODES[code], self.buffer[start : start + nbytes])
        if sys.byteorder == "big":
            found.byteswap()
        return found

    def _width(self, code: int) -> int:
        if code not in _SCALAR_STRUCTS:
            raise self.error(f"unknown metadata type {code}")
        return _SCALAR_STRUCTS[code].size

    def _skip(self, code: int, length: int) -> None:
        """Step over an array. For strings this loop is the whole cost of the header, hence its bareness."""
        if code != _STRING:
            self.need(length * self._width(code))
            return
        buffer, at, unpack = self.buffer, self.at, _U64.unpack_from
        try:
            for _ in range(length):
                at += 8 + unpack(buffer, at)[0]
        except (struct.error, OverflowError) as broken:
            raise self.error("truncated header: a string array does not fit in the file") from broken
        self.at = at
        self.need(0)


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to this float32."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def _preamble(cursor: _Cursor) -> tuple[int, int, int]:
    mark = cursor.buffer[:4]
    if mark != MAGIC:
        raise GGUFError(f"{cursor.path}: not a GGUF file (starts with {mark!r})", fixes=("give a .gguf file",))
    cursor.at = 4
    version = cursor.u32()
    if version & 0xFFFF == 0 and version:
        raise cursor.error("big-endian GGUF; only little-endian files are read")
    if version not in VERSIONS:
        raise cursor.error(f"GGUF version {version}; versions 2 and 3 are read")
    n_tensors, n_keys = cursor.u64(), cursor.u64()
    if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
        raise cursor.error(f"absurd counts: {n_tensors} tensors (at most {MAX_TENSORS}), {n_keys} keys ({MAX_KEYS})")
    return version, n_tensors, n_keys


def _metadata(cursor: _Cursor, n_keys: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.string(MAX_NAME_BYTES)
        if key in found:
            raise cursor.error(f"metadata key {key!r} stands twice")
        found[key] = cursor.value(cursor.u32())
    return found


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, n_dims = cursor.string(MAX_NAME_BYTES), cursor.u32()
    if not 0 < n_dims <= MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
    dims = tuple(cursor.u64() for _ in range(n_dims))
    return name, dims, cursor.u32(), cursor.u64()


def _place(
    infos: list[tuple[str, tuple[int, ...], int, int]], data_offset: int, cursor: _Cursor, file_bytes: int | None
) -> dict[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for name, dims, code, offset in infos:
        if name in tensors:
            raise cursor.error(f"tensor {name!r} stands twice")
        if code not in GGML_TYPES:
            raise cursor.error(f"tensor {name!r} has unknown ggml type {code}")
        type_name, block, block_bytes = GGML_TYPES[code]
        elements = prod(dims)
        if not 0 < elements <= MAX_ELEMENTS or dims[0] % block:
            raise cursor.error(f"tensor {name!r}: shape {dims} is absurd or no multiple of {type_name}'s block {block}")
        nbytes, start = elements // block * block_bytes, data_offset + offset
        if file_bytes is not None and start + nbytes > file_bytes:
            raise cursor.error(
                f"truncated file: tensor {name!r} ends at byte {start + nbytes}, the file at {file_bytes}"
            )
        tensors[name] = GGUFTensor(name, dims[::-1], type_name, start, nbytes)
    return tensors
