"""Which engines can be measured here, and how each one's program is started."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True, slots=True)
class Engine:
    """name as shown; command: what runs its worker, without model and threads; options: what follows them."""

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()

    def start(self, model: Path, threads: int) -> list[str]:
        return [*self.command, str(model), str(threads), *self.options]


@dataclass(frozen=True, slots=True)
class Found:
    """The engines that are here, and why others are not."""

    engines: tuple[Engine, ...]
    missing: tuple[str, ...]


def kvarn(kv: str | None = None) -> Engine:
    """Kvarn with its default cache, or with `kv`."""
    name = "kvarn" if kv is None else f"kvarn {kv}"
    return Engine(name, (sys.executable, str(WORKERS / "run_kvarn.py")), () if kv is None else (kv,))


def find_peers(folder: Path) -> Found:
    """folder: where `make peers` put them: venv/ (Python packages) and llama.cpp/ (programs)."""
    python = folder / "venv" / "bin" / "python"
    engines: list[Engine] = []
    missing: list[str] = []
    programs = folder / "llama.cpp"
    if (programs / "llama-batched-bench").exists():
        worker = (sys.executable, str(WORKERS / "run_llama_cpp.py"))
        engines += [Engine(f"llama.cpp {kv}", worker, (str(programs), kv)) for kv in ("f16", "q8_0")]
    else:
        missing.append(f"llama.cpp: no llama-batched-bench in {programs}")
    if any((folder / "venv").glob("lib/python*/site-packages/openvino_genai")):
        worker = (str(python), str(WORKERS / "run_openvino.py"))
        engines += [Engine(f"openvino {kv}", worker, (kv,)) for kv in ("f16", "u8")]
    else:
        missing.append(f"OpenVINO GenAI: not installed in {folder / 'venv'}")
    if importlib.util.find_spec("transformers") is not None:
        engines.append(Engine("transformers bf16", (sys.executable, str(WORKERS / "run_transformers.py"))))
    else:
        missing.append("transformers: not installed beside Kvarn")
    return Found(tuple(engines), tuple(missing))
