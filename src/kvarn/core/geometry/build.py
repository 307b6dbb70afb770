"""config.json -> ModelGeometry: finds the text model in a multimodal config, refuses what has no decoder cache, finds
the family by model_type, and flags what was not understood."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from kvarn.core.errors import ConfigError, UnknownArchitecture
from kvarn.core.geometry.model import ModelGeometry, ParameterCount
from kvarn.core.geometry.parts import LayerPart, ModelParts
from kvarn.core.geometry.reader import ConfigReader
from kvarn.core.registry import names_in

Family = Callable[[ConfigReader], ModelParts]

_FAMILIES = "kvarn.core.geometry.families"
# Where a multimodal config keeps its language model.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "lm_config", "language_model_config")

_ENCODER_DECODERS = """
    t5 mt5 umt5 byt5 t5gemma t5gemma2 longt5 switch_transformers bart mbart mbart50 barthez bartpho plbart marian
    pegasus pegasus_x bigbird_pegasus blenderbot blenderbot-small led m2m_100 nllb nllb-moe nllb_moe prophetnet
    xlm-prophetnet fsmt mvp whisper speech_to_text speech_encoder_decoder vision-encoder-decoder encoder-decoder
    seamless_m4t seamless_m4t_v2 speecht5 udop florence2 moonshine trocr pix2struct donut nougat bark musicgen dia
    time_series_transformer informer autoformer pop2piano t5encoder kyutai_speech_to_text"""
ENCODER_DECODERS = frozenset(_ENCODER_DECODERS.split())
_ENCODERS = """
    bert roberta xlm-roberta xlm-roberta-xl albert electra distilbert deberta deberta-v2 camembert mpnet modernbert
    nomic_bert eurobert clip siglip siglip2 vit dinov2 layoutlm layoutlmv3 esm longformer big_bird funnel xlnet xlm
    mobilebert squeezebert rembert roformer gemma-embedding"""
ENCODERS = frozenset(_ENCODERS.split())
# Spellings of one architecture, and multimodal or remote-code names whose text model is another's.
ALIASES = {
    "mistral3": "mistral",
    "pixtral": "mistral",
    "llava": "llama",
    "llava_next": "mistral",
    "idefics3": "llama",
    "smolvlm": "llama",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "gemma4_unified_text": "gemma4_text",
    "paligemma": "gemma",
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_5_omni": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "step3p7": "step3p5",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "muse_glimmer": "muse_glimmer_text",
    "inkling": "inkling_text",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "deepseek_vl_v2": "deepseek_v2",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "internvl": "qwen2",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "Yi": "yi",
    "phi-msft": "phi",
    "phi4_multimodal": "phi3",
    "phi4mm": "phi3",
    "stablelm_epoch": "stablelm",
    "InternLM": "llama",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "llama_moe": "mixtral",
    "Gemma3ForCausalLM": "gemma3_text",
}
_DTYPES = frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn"})


def geometry_of(config: Mapping[str, Any], *, name: str = "", provenance: str = "") -> ModelGeometry:
    """The geometry of the (text) model that `config`, a config.json as a dict, describes.

    Raises UnknownArchitecture (model_type unknown, missing, or a model without a decoder cache) and ConfigError
    (a value is missing, malformed or absurd). Keys that look like cache geometry and are not understood end in
    `unknown_keys` and in `notes`.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"a config is a JSON object, not {type(config).__name__}")
    text, outer = _text_config(config)
    model_type = _model_type(text, config)
    family = _family(model_type)
    reader = ConfigReader(text, class_defaults().get(model_type, {}), model_type)
    reader.understood(("model_type", *_TEXT_KEYS))
    if outer:
        reader.note("the language model alone: vision and audio towers are not counted")
    return _geometry(model_type, reader, _parts(family, reader), name, provenance, config)


def _parts(family: Family, reader: ConfigReader) -> ModelParts:
    """The family's answer. Families check sizes; a value of a kind that no config has (a dictionary for a number, a
    list that is too short) is the file's fault as well, and is said to be."""
    try:
        return family(reader)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"the {reader.model_type} config is malformed: {error}", fixes=("fetch the model's own config.json again",)
        ) from error


def known_model_types() -> tuple[str, ...]:
    """Every model_type that `geometry_of` understands, sorted; aliases included."""
    return tuple(sorted({*_families(), *ALIASES}))


@cache
def class_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Values of transformers' config classes for keys that decide geometry, by model_type. A config.json may leave
    out what equals its class's default (Gemma 3 4B states neither heads nor head_dim)."""
    return json.loads(files("kvarn.core.geometry").joinpath("defaults.json").read_text("utf-8"))["model_types"]


@cache
def _families() -> Mapping[str, Family]:
    found: dict[str, Family] = {}
    for name in names_in(_FAMILIES):
        found |= import_module(f"{_FAMILIES}.{name}").FAMILY
    return found


def _family(model_type: str) -> Family:
    if found := _families().get(model_type):
        return found
    raise UnknownArchitecture(
        f"architecture {model_type!r} is not known; its cache cannot be derived",
        fixes=("give the factors: --layers N --kv-heads N --head-dim N", f"known: {', '.join(known_model_types())}"),
    )


def _text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The language model's own config, and whether it stood inside a multimodal one."""
    found, inner = config, False
    while key := next((k for k in _TEXT_KEYS if isinstance(found.get(k), Mapping)), None):
        nested = found[key]
        shared = {
            k: found[k] for k in ("tie_word_embeddings", "dtype", "torch_dtype") if k in found and k not in nested
        }
        found, inner = {**shared, **nested}, True
        if not found.get("model_type"):
            found["model_type"] = config.get("model_type")
    return found, inner


def _model_type(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    for stated in (text.get("model_type"), config.get("model_type")):
        if isinstance(stated, str) and (stated in ENCODER_DECODERS or stated in ENCODERS):
            what = "an encoder-decoder" if stated in ENCODER_DECODERS else "an encoder"
            raise UnknownArchitecture(f"{stated} is {what}; Kvarn plans decoder-only models")
    if text.get("is_encoder_decoder"):
        raise UnknownArchitecture(f"{text.get('model_type')} is an encoder-decoder; Kvarn plans decoder-only models")
    stated = text.get("model_type")
    if not isinstance(stated, str) or not stated:
        raise ConfigError("the config has no model_type", fixes=("give the model's own config.json",))
    return stated if stated in _families() else ALIASES.get(stated, stated)


def _geometry(
    model_type: str, c: ConfigReader, parts: ModelParts, name: str, provenance: str, config: Mapping[str, Any]
) -> ModelGeometry:
    unknown, dtype, weight_format = c.unknown_keys(), _dtype(c, config), _weight_format(c, config)
    notes = list(c.notes)
    if unknown:
        notes.append(f"keys that look like cache geometry and are not understood: {', '.join(unknown)}")
    architectures = c.stated("architectures")
    return ModelGeometry(
        architecture=architectures[0] if isinstance(architectures, list) and architectures else model_type,
        layers=tuple(part.spec for part in parts.layers),
        hidden_size=c.size("hidden_size", "n_embd", "d_model", "dim"),
        vocab_size=c.size("vocab_size", "padded_vocab_size"),
        max_context=_max_context(c),
        dtype=dtype,
        name=name or str(config.get("_name_or_path") or ""),
        provenance=provenance,
        notes=tuple(notes),
        drafts=tuple(part.spec for part in parts.drafts),
        parameters=_parameters(parts) if parts.countable else None,
        tied_embeddings=parts.output < parts.embedding,
        intermediate_size=parts.width,
        experts=parts.n_experts,
        experts_active=parts.n_active,
        weight_format=weight_format,
        unknown_keys=unknown,
    )


def _max_context(c: ConfigReader) -> int | None:
    names = ("max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "max_seq_len", "seq_length")
    found = c.get(*names, "max_sequence_length")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def _dtype(c: ConfigReader, config: Mapping[str, Any]) -> str:
    stated = str(c.stated("dtype", "torch_dtype") or config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    stated = stated.removeprefix("torch.")
    if stated not in _DTYPES:
        c.note(f"weights of type {stated!r} are counted as bfloat16")
        return "bfloat16"
    return stated


def _weight_format(c: ConfigReader, config: Mapping[str, Any]) -> str:
    """The published quantization, in the words of weight formats; '' for plain floats. An unknown one is noted."""
    stated = c.stated("quantization_config") or config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return ""
    method, bits = str(stated.get("quant_method", "")).lower(), stated.get("bits") or stated.get("w_bit")
    algorithm = str(stated.get("quant_algo") or stated.get("format") or "").lower()
    for name in ("nvfp4", "mxfp4", "fp8"):
        if name in method or name in algorithm:
            return name
    if method in ("awq", "gptq") or "pack-quantized" in algorithm or bits in (4, 8):
        return "int8" if bits == 8 or "int8" in algorithm else "int4"
    if method == "compressed-tensors" and "float-quantized" in algorithm:
        return "fp8"
    c.note(f"weights are quantized by {method or algorithm!r}, which is not known: counted as {_dtype(c, config)}")
    return ""


def _parameters(parts: ModelParts) -> ParameterCount:
    def total(layers: tuple[LayerPart, ...]) -> int:
        return sum(p.parameters + p.experts for p in layers)

    return ParameterCount(
        embedding=parts.embedding,
        output=parts.output,
        layers=sum(p.parameters for p in parts.layers) + parts.other,
        experts=sum(p.experts for p in parts.layers),
        active_experts=sum(p.active_experts for p in parts.layers),
        drafts=total(parts.drafts),
    )
