"""A model as a Hugging Face directory in bfloat16, for engines that read nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvarn.core.errors import UnknownArchitecture
from kvarn.core.files import ModelFiles
from kvarn.models.base import SHARE_LAYERS, load_architecture
from kvarn.models.build import Wanted
from kvarn.models.config import text_config
from kvarn.models.loading.load import open_model
from kvarn.models.weights.base import TensorSource
from kvarn.text import load_tokenizer
from kvarn.text.tokenizer import Tokenizer


def export_hf(files: ModelFiles, folder: Path) -> Path:
    """Write config.json, model.safetensors and the tokenizer into `folder`, whole or not at all; a folder that is there
    is left as it is. Every number is the file's own, rounded to bfloat16. Raises ModelError, UnknownArchitecture where
    transformers has no class for it."""
    if folder.is_dir():
        return folder
    config, source = open_model(files.path)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file(tensors_of(config, source), part / "model.safetensors", metadata={"format": "pt"})
    _write(part / "config.json", _config(config))
    _write_tokenizer(part, load_tokenizer(files))
    return part.rename(folder)


def tensors_of(config: dict[str, Any], source: TensorSource) -> dict[str, Tensor]:
    """Everything that the architecture asks for, in bfloat16, under its Hugging Face name."""
    wanted = Wanted()
    load_architecture(str(config["model_type"]))({**text_config(config), SHARE_LAYERS: 1}, wanted)
    found = {}
    for name, shape in wanted.shapes().items():
        numbers = torch.empty(shape)
        source.read(name, numbers)
        if source.norms_include_one and wanted.norms.get(name, (0, False))[1]:
            numbers -= 1
        found[name] = numbers.bfloat16()
    return found


def _config(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the name of transformers' class and the numbers' type."""
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415  (only peers need it)
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES,
    )

    kind = str(config["model_type"])
    if kind not in CLASSES:
        raise UnknownArchitecture(f"transformers has no causal model of type {kind!r}")
    return {**config, "architectures": [CLASSES[kind]], "dtype": "bfloat16"}


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    settings = tokenizer.settings
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **settings.tokens}
    about |= {"add_bos_token": settings.add_bos, "add_eos_token": settings.add_eos}
    if template := settings.chat_templates.get("default"):
        about["chat_template"] = template
    _write(folder / "tokenizer_config.json", about)
    _write(folder / "generation_config.json", {"eos_token_id": sorted(settings.end_ids)})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
