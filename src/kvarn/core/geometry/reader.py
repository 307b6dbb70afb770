"""Reading a config.json: checked values, class defaults where a file leaves them out, and a record of what was read,
so that a key which looks like cache geometry and was understood by nobody is flagged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvarn.core.errors import ConfigError

MAX_COUNT = 1 << 31
MAX_LAYERS = 1 << 14
MAX_DRAFTS = 256
_MISSING = object()

# A key that matches says something about the cache, unless a family reads it or it is listed as harmless.
_CACHE_LIKE = re.compile(
    r"kv|key_value|cache|window|sliding|chunk|latent|lora_rank|ssm|mamba|conv|state|recurrent|layer_type|layers_type"
    r"|block_type|pattern|share|cla_|head_dim|n_head|num_head|heads|index|linear_|attn_type|attention_type|local|global"
    r"|sparse|compress|mixer|nextn|mtp|qk_|rwkv|lightning|retention|swa|attn_layer|full_attn|k_eq_v|num_hidden_layers"
    r"|n_layer|dilat|memory"
)
_HARMLESS_WORDS = """
    use_cache cache_implementation initializer_range attention_dropout attn_implementation router_aux_loss_coef
    image_token_index audio_token_index video_token_index boi_token_index eoi_token_index eoa_token_index
    chunk_size_feed_forward use_mamba_kernels output_hidden_states return_dict_in_generate is_encoder_decoder
    add_cross_attention cross_attention_hidden_size max_window_layers use_sliding_window decoder_sparse_step
    mlp_only_layers mamba_conv_bias mamba_proj_bias mamba_chunk_size mamba_rms_norm mamba_norm_before_gate conv_bias
    use_conv_bias conv_use_xavier_init moe_shared_expert_overlap shared_expert_intermediate_size
    shared_intermediate_size n_shared_experts num_shared_experts moe_num_shared_experts shared_expert_overlap
    moe_shared_expert_intermediate_size share_expert_dim share_expert_dims moe_share_expert_dim
    scale_attn_by_inverse_layer_idx image_token_id mm_tokens_per_image rope_local_base_freq
    qk_layernorm qk_layer_norm use_qk_norm qk_norm qk_scale_factor query_pre_attn_scalar key_multiplier
    index_topk index_n_heads indexer_rope_interleave index_rope_interleave ssm_multipliers ssm_in_multiplier
    ssm_out_multiplier linear_attn_alpha_factor linear_attn_beta_factor full_attn_alpha_factor full_attn_beta_factor
    share_embeddings shared_embeddings tie_word_embeddings shared_expert_gate use_shared_expert_gate
    moe_layer_type mlp_layer_types first_k_dense_replace quantization_config hidden_mamba_act mamba_hidden_act
    rope_interleave residual_in_fp32 rescale_prenorm_residual chunk_size linear_a_log_min linear_a_log_max
    linear_dt_min linear_dt_max linear_dt_init_floor linear_allow_neg_eigval mamba_dt_rank mtp_use_dedicated_embeddings
    attn_output_gate kv_cache_scheme kv_cache_quant_algo local_files_only vision_feature_layer lm_head_bias
    shared_expert_sink mtp_hidden_states_first chain_hidden_post_norm index_score_func compress_rope_theta
    index_share_for_mtp_iteration
    swiglu_limit summary_first_dropout global_rank local_rank attn_chunk_impl qk_rope_interleave
    activation_sparsity_pattern initializer_cutoff_factor indexer_layernorm indexer_bias rope_theta_local
    share_encoder_decoder_embeddings output_router_logits moe_layer_start_index moe_layer_end_index"""
_HARMLESS = frozenset(_HARMLESS_WORDS.split())


class ConfigReader:
    """One (text) config. `defaults` are the values of the architecture's config class in transformers."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], model_type: str) -> None:
        self._config, self._defaults, self.model_type = config, defaults, model_type
        self._read: set[str] = set()
        self._notes: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def stated(self, *names: str) -> Any:
        """The first of `names` that the config itself states and does not leave null; else None."""
        self._read.update(names)
        return next((self._config[n] for n in names if self._config.get(n) is not None), None)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` (spellings of one key) that is stated, else the class default, else `default`.
        A stated null counts as unstated; a class default that is used for a size is noted."""
        if (value := self.stated(*names)) is not None:
            return value
        explicit_null = any(n in self._config for n in names)
        for name in names:
            value = self._defaults.get(name)
            if value is not None and not explicit_null:
                return value
        return default

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive integer. Raises ConfigError where it is missing, not an integer, below 1 or absurd."""
        if self.stated(*names) is None and default is None and any(self._defaults.get(n) for n in names):
            self.note(f"{names[0]} is not in the config; {self.model_type}'s default {self.get(*names)} is used")
        return self._integer(names[0], self.get(*names, default=_MISSING if default is None else default), low=1)

    def layers(self, *names: str) -> int:
        """A number of layers: a size that is not absurd. Raises ConfigError."""
        found = self.size(*names)
        if found > MAX_LAYERS:
            raise ConfigError(f"{names[0]} is {found}; {MAX_LAYERS} layers are the most that is read")
        return found

    def drafts(self, *names: str, default: int = 0) -> int:
        """A number of draft layers, possibly 0. Raises ConfigError where it is absurd."""
        found = self.count(*names, default=default)
        if found > MAX_DRAFTS:
            raise ConfigError(f"{names[0]} is {found}; {MAX_DRAFTS} draft layers are the most that is read")
        return found

    def count(self, *names: str, default: int = 0) -> int:
        """An integer that may be 0. Raises ConfigError."""
        return self._integer(names[0], self.get(*names, default=default), low=0)

    def optional_size(self, *names: str) -> int | None:
        value = self.get(*names)
        return None if value is None else self._integer(names[0], value, low=1)

    def flag(self, *names: str, default: bool = False) -> bool:
        return bool(self.get(*names, default=default))

    def sequence(self, *names: str) -> list[Any] | None:
        """A list, or None where unstated. Raises ConfigError where it is something else."""
        value = self.get(*names)
        if value is None or isinstance(value, list):
            return value
        if isinstance(value, tuple):
            return list(value)
        raise ConfigError(f"{names[0]} is {value!r}; a list is expected")

    def per_layer(self, name: str, layers: int, *aliases: str) -> list[Any] | None:
        """A list with one entry a layer. Raises ConfigError where the lengths differ."""
        value = self.sequence(name, *aliases)
        if value is not None and len(value) != layers:
            raise ConfigError(f"{name} has {len(value)} entries for {layers} layers")
        return value

    def sub(self, name: str) -> ConfigReader:
        """A nested dict of the config as a reader of its own; empty where it is missing."""
        value = self.get(name, default={})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} is {type(value).__name__}; a dictionary is expected")
        return ConfigReader(value, self._defaults.get(name) or {}, self.model_type)

    def understood(self, names: Iterable[str]) -> None:
        self._read.update(names)

    def unknown_keys(self) -> tuple[str, ...]:
        """Keys that look like cache geometry, are set, and were read by nobody."""
        return tuple(
            sorted(
                key
                for key, value in self._config.items()
                if key not in self._read
                and key not in _HARMLESS
                and not key.startswith("_")
                and _CACHE_LIKE.search(key)
                and value not in (None, False, 0, [], {}, "")
                and not isinstance(value, float)
                and value != self._defaults.get(key, _MISSING)
            )
        )

    def _integer(self, name: str, value: Any, low: int) -> int:
        if value is _MISSING:
            raise ConfigError(
                f"{self.model_type} config has no {name}", fixes=(f"state {name}", "give the model's own config.json")
            )
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} is {value!r}; an integer is expected")
        if not low <= value < MAX_COUNT:
            raise ConfigError(f"{name} is {value}; {low} to {MAX_COUNT - 1} is possible")
        return value
