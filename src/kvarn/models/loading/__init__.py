"""From a model's files to a model: which tensors there are, reading them, building the architecture over them."""

from kvarn.models.loading.load import build_model, load_model, read_config

__all__ = ["build_model", "load_model", "read_config"]
