"""Which engines can be measured here, and how each one's program is started."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True, slots=True)
class Engine:
    """name as shown; command: what runs its worker, without model and threads; options: what follows them. model: a
    file of its own, where it is faster with another form of the same weights."""

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    model: Path | None = None

    def start(self, model: Path, threads: int) -> list[str]:
        return [*self.command, str(self.model or model), str(threads), *self.options]


@dataclass(frozen=True, slots=True)
class Found:
    """The engines that are here, and why others are not."""

    engines: tuple[Engine, ...]
    missing: tuple[str, ...]


def kvarn(kv: str | None = None) -> Engine:
    """Kvarn with its default cache, or with `kv`."""
    name = "kvarn" if kv is None else f"kvarn {kv}"
    return Engine(name, (sys.executable, str(WORKERS / "run_kvarn.py")), () if kv is None else (kv,))


def q4_0_file(programs: Path, model: Path, folder: Path) -> Path | None:
    """The model in Q4_0, made once by llama.cpp's own llama-quantize: its prompts are faster there. None without it."""
    made, program = folder / f"{model.stem}.q4_0.gguf", programs / "llama-quantize"
    if made.exists():
        return made
    if not program.exists():
        return None
    part = made.with_suffix(".part")
    command = [str(program), "--allow-requantize", str(model), str(part), "Q4_0"]
    done = subprocess.run(command, capture_output=True, check=False, env={"LD_LIBRARY_PATH": str(programs)})
    return part.rename(made) if done.returncode == 0 else None


def find_peers(folder: Path, model: Path) -> Found:
    """folder: where `make peers` put them: venv/ (Python packages) and llama.cpp/ (programs). model: a GGUF file."""
    python = folder / "venv" / "bin" / "python"
    engines: list[Engine] = []
    missing: list[str] = []
    programs = folder / "llama.cpp"
    if (programs / "llama-batched-bench").exists():
        worker = (sys.executable, str(WORKERS / "run_llama_cpp.py"))
        engines += [Engine(f"llama.cpp {kv}", worker, (str(programs), kv)) for kv in ("f16", "q8_0")]
        if other := q4_0_file(programs, model, folder):
            engines.append(Engine("llama.cpp f16, Q4_0 file", worker, (str(programs), "f16"), other))
        else:
            missing.append("llama.cpp with a Q4_0 file: llama-quantize is not there or failed")
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
