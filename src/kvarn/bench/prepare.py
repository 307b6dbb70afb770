"""Other forms of a model's file, made once for the engines that want them or are faster with them."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from kvarn.bench.export import export_hf
from kvarn.core.errors import KvarnError
from kvarn.core.files import ModelFiles, fingerprint


def kept_as(model: Path, folder: Path, form: str) -> Path:
    """Where another form of `model` is kept: another file of the same name has another place."""
    digest = hashlib.sha256(fingerprint(model).encode()).hexdigest()[:8]
    return folder / f"{model.stem}-{digest}{form}"


def q4_0_file(model: Path, programs: Path, folder: Path) -> Path:
    """The model in Q4_0 by llama.cpp's own llama-quantize: prompts are faster there. Raises KvarnError with what the
    program said."""
    made = kept_as(model, folder, ".q4_0.gguf")
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    part = made.with_suffix(".part")
    command = [str(programs / "llama-quantize"), "--allow-requantize", str(model), str(part), "Q4_0"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={"LD_LIBRARY_PATH": str(programs)}
        )
    except OSError as error:
        raise KvarnError(f"no Q4_0 file: {error}", fixes=("make peers",)) from error
    if done.returncode:
        raise KvarnError(f"no Q4_0 file: llama-quantize ended with {done.returncode}: {done.stderr[-300:]}")
    return part.rename(made)


def hf_directory(model: Path, folder: Path) -> Path:
    """The model's numbers in bfloat16 as a Hugging Face directory. Raises ModelError, UnknownArchitecture."""
    made = kept_as(model, folder, "-hf")
    return export_hf(ModelFiles.of("gguf", model.stem, model, (model,)), made)
