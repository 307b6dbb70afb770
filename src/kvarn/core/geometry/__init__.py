"""A model's geometry from its config, a GGUF header's config, or factors. No torch."""

from kvarn.core.geometry.build import geometry_of, known_model_types
from kvarn.core.geometry.factors import geometry_from_factors
from kvarn.core.geometry.model import ModelGeometry, ParameterCount

__all__ = ["ModelGeometry", "ParameterCount", "geometry_from_factors", "geometry_of", "known_model_types"]
