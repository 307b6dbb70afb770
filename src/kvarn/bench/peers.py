"""Which engines can be measured here, and how each one's program is started."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvarn.bench.prepare import hf_directory, q4_0_file
from kvarn.core.errors import KvarnError
from kvarn.core.options import Numerics

WORKERS = Path(__file__).parent / "workers"
OWN = "kvarn"
CACHE_BITS = {"f16": 16, "q8_0": 9, "u8": 9}  # with their scales
VLLM_CACHE_GIB = 4  # 32 streams of 4,224 tokens of the default model take 2.9 GiB in bfloat16


@dataclass(frozen=True, slots=True)
class Engine:
    """name as shown; command: what runs its worker, without model and threads; options: what follows them. model: a
    file of its own, where it is measured with another form of the same weights. family: whose it is; of each family the
    faster ones are measured in every round. slow_start: takes minutes, so that it stays. cache_bits: of a number in its
    cache, at most. reserved_bytes: of its cache, whatever is in it. keeps: holds the cache between the rounds of a kept
    case."""

    name: str
    family: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    model: Path | None = None
    slow_start: bool = False
    cache_bits: int = 16
    reserved_bytes: int = 0
    keeps: bool = True

    def start(self, model: Path, threads: int) -> list[str]:
        return [*self.command, str(self.model or model), str(threads), *self.options]


@dataclass(frozen=True, slots=True)
class Found:
    """The engines that are here, and why others are not."""

    engines: tuple[Engine, ...]
    missing: tuple[str, ...]


def kvarn(kv: str | None = None, numerics: Numerics = "invariant") -> Engine:
    """Kvarn with its default cache, or with `kv`. Each is a family of its own: all are measured in every round."""
    name = " ".join((OWN, *((kv,) if kv else ()), *((numerics,) if numerics != "invariant" else ())))
    worker = (sys.executable, str(WORKERS / "run_kvarn.py"))
    return Engine(name, name, worker, (numerics, kv or ""), cache_bits=32 if "float32" in name else 16)


def find_peers(folder: Path, model: Path) -> Found:
    """folder: where `make peers` put them: venv/ and vllm/ (Python packages), llama.cpp/ (programs); other forms of the
    model are made in models/. model: a GGUF file."""
    engines: list[Engine] = []
    missing: list[str] = []
    for look in (_llama_cpp, _openvino, _vllm, _transformers):
        try:
            for engine in look(folder, model):
                engines.append(engine)  # those before a failure count
        except KvarnError as error:
            missing.append(str(error))
    return Found(tuple(engines), tuple(missing))


def _llama_cpp(folder: Path, model: Path) -> Iterator[Engine]:
    programs = folder / "llama.cpp"
    if not (programs / "llama-batched-bench").exists():
        raise KvarnError(f"llama.cpp: no llama-batched-bench in {programs}", fixes=("make peers",))
    worker = (sys.executable, str(WORKERS / "run_llama_cpp.py"), str(programs))
    for engine in _with_both_files("llama.cpp", worker, ("f16", "q8_0"), folder, model):
        yield replace(engine, keeps=False)  # each run is a process of its own


def _openvino(folder: Path, model: Path) -> Iterator[Engine]:
    if not is_installed(folder / "venv", "openvino_genai"):
        raise KvarnError(f"OpenVINO GenAI: not installed in {folder / 'venv'}", fixes=("make peers",))
    worker = (str(folder / "venv" / "bin" / "python"), str(WORKERS / "run_openvino.py"))
    yield from _with_both_files("openvino", worker, ("f16", "u8"), folder, model)


def _with_both_files(
    family: str, worker: tuple[str, ...], caches: tuple[str, ...], folder: Path, model: Path
) -> Iterator[Engine]:
    """Every form of the cache with the model's file, then with a Q4_0 file. Raises KvarnError where that cannot be
    made."""
    for cache in caches:
        yield Engine(f"{family} {cache}", family, worker, (cache,), cache_bits=CACHE_BITS[cache])
    other = q4_0_file(model, folder / "llama.cpp", folder / "models")
    for cache in caches:
        name = f"{family} {cache}, Q4_0 file"
        yield Engine(name, family, worker, (cache,), other, cache_bits=CACHE_BITS[cache])


def _vllm(folder: Path, model: Path) -> Iterator[Engine]:
    if not is_installed(folder / "vllm", "vllm"):
        raise KvarnError(f"vLLM: not installed in {folder / 'vllm'}", fixes=("make peers",))
    worker = (str(folder / "vllm" / "bin" / "python"), str(WORKERS / "run_vllm.py"))
    weights = hf_directory(model, folder / "models")
    options = (str(weights), str(VLLM_CACHE_GIB))
    yield Engine("vllm bf16", "vllm", worker, options, slow_start=True, reserved_bytes=VLLM_CACHE_GIB << 30)


def _transformers(folder: Path, model: Path) -> Iterator[Engine]:
    if importlib.util.find_spec("transformers") is None:
        raise KvarnError("transformers: not installed beside Kvarn", fixes=("make peers",))
    worker = (sys.executable, str(WORKERS / "run_transformers.py"))
    weights = hf_directory(model, folder / "models")
    # Without AVX-512 torch widens bfloat16 one by one: minutes for a prompt that float32 takes seconds for.
    dtype = "bfloat16" if "AVX512" in torch.backends.cpu.get_cpu_capability() else "float32"
    for attention in ("sdpa", "eager"):
        options = (str(weights), dtype, attention)
        bits = 32 if dtype == "float32" else 16
        yield Engine(f"transformers {dtype} {attention}", "transformers", worker, options, cache_bits=bits)


def is_installed(venv: Path, package: str) -> bool:
    """Whether that environment holds the package."""
    return any(venv.glob(f"lib/python*/site-packages/{package}"))
