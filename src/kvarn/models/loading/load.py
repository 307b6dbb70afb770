"""`load_model`: a config, a source of tensors and a weight kind become a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvarn.core.errors import ConfigError, ModelError, UnknownName
from kvarn.core.files import ModelFiles
from kvarn.core.gguf_config import config_from_gguf
from kvarn.core.gguf_header import read_gguf_header, shard_paths
from kvarn.core.options import NUMERICS, Numerics
from kvarn.core.registry import load
from kvarn.models.base import SHARE_LAYERS, CausalLM, load_architecture
from kvarn.models.build import Loaded, Wanted, check
from kvarn.models.config import Config, text_config
from kvarn.models.loading.gguf import GGUFSource
from kvarn.models.loading.safetensors import SafetensorsSource, weight_files
from kvarn.models.weights.base import TensorSource, WeightKind


def load_model(
    files: ModelFiles | Path | str,
    weights: str = "native",
    share_layers: int = 1,
    numerics: Numerics = "invariant",
    fast_memory_bytes: int | None = None,
) -> CausalLM:
    """Read a model from a GGUF file or a Hugging Face directory.

    weights: a file of `models/weights`, or 'native' for what is fastest for the file. share_layers: so many
    neighbouring layers use the first one's cache. numerics, fast_memory_bytes: see `EngineOptions`. Raises
    IncompatiblePlan (share_layers), ModelError (file, tensors), ConfigError, UnknownArchitecture, UnknownName (weights,
    numerics).
    """
    kind = load_kind(weights, numerics)
    path = files.path if isinstance(files, ModelFiles) else Path(files)
    config, source = open_model(path)
    return build_model(config, source, kind, share_layers, fast_memory_bytes)


def load_kind(weights: str, numerics: Numerics = "invariant") -> WeightKind:
    """The weight kind called `weights`. Raises UnknownName."""
    if numerics not in NUMERICS:
        raise UnknownName("numerics", numerics, NUMERICS)
    return load("kvarn.models.weights", weights, "FAST" if numerics == "fast" else "KIND", "weight kind")


def build_model(
    config: Config,
    source: TensorSource,
    kind: WeightKind,
    share_layers: int = 1,
    fast_memory_bytes: int | None = None,
) -> CausalLM:
    """Build the config's architecture over `source`. Raises ModelError naming every missing or misshapen tensor."""
    architecture = load_architecture(str(config.get("model_type")))
    config = {**text_config(config), SHARE_LAYERS: share_layers}
    wanted = Wanted(kind.activations)
    architecture(config, wanted)
    check(wanted, source)
    return architecture(config, Loaded(wanted, source, kind, fast_memory_bytes))


def read_config(path: Path) -> dict[str, Any]:
    """The config of a GGUF file or a Hugging Face directory, in Hugging Face's vocabulary."""
    return config_from_gguf(read_gguf_header(path)) if path.is_file() else _json_config(path)


def open_model(path: Path) -> tuple[dict[str, Any], TensorSource]:
    """The config and the tensors of a GGUF file or a Hugging Face directory, nothing read yet. Raises ModelError,
    ConfigError, UnknownArchitecture."""
    if path.is_file():
        return _open_gguf(path)
    return _json_config(path), SafetensorsSource(weight_files(path), str(path))


def _open_gguf(path: Path) -> tuple[dict[str, Any], TensorSource]:
    first = read_gguf_header(path)
    headers = [first, *(read_gguf_header(shard) for shard in shard_paths(path, first)[1:])]
    config = config_from_gguf(first)
    load_architecture(str(config["model_type"]))
    source = GGUFSource(headers, int(config["num_attention_heads"]), int(config["num_key_value_heads"]))
    return _with_rope_factors(config, source), source


def _with_rope_factors(config: dict[str, Any], source: GGUFSource) -> dict[str, Any]:
    """Where the file holds the frequencies' factors as a tensor, put its numbers into the config."""
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "tensor":
        rope = {**rope, "rope_type": "factors", "factors": source.vector(rope["factors_tensor"])}
    elif "long_factors_tensor" in rope:
        long, short = (source.vector(rope[f"{side}_factors_tensor"]) for side in ("long", "short"))
        rope = {**rope, "long_factor": long, "short_factor": short}
    else:
        return config
    return {key: value for key, value in config.items() if key != "rope_scaling"} | {"rope_parameters": rope}


def _json_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{directory} has no config.json", fixes=("give a GGUF file or a model directory",)) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error})", fixes=("fetch it again",)) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{path} states no model_type", fixes=("give a transformers config",))
    return config
