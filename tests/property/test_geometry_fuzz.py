"""Whatever stands in a config: a geometry, or an error that says what is wrong. Nothing else ever comes out."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn.core.errors import KvarnError
from kvarn.core.geometry import geometry_of
from kvarn.core.geometry.build import _families, class_defaults
from kvarn.planner.catalogue import model_entries

STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 3, 7, 1 << 20, 1 << 40, 0.5, float("nan"), "", "auto", "MEM*-", "full_attention"]),
    st.lists(st.one_of(st.integers(-1, 9), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """A config of some architecture with some of its values replaced."""
    model_type = draw(st.sampled_from(sorted(_families())))
    listed = [dict(e.config) for e in model_entries() if e.config["model_type"] == model_type]
    config = draw(st.sampled_from(listed)) if listed else {**class_defaults().get(model_type, {})}
    config = {**config, "model_type": model_type}
    for key in draw(st.lists(st.sampled_from(sorted(config)), max_size=3, unique=True)):
        if key != "model_type":
            config[key] = draw(STRANGE)
    return config


@settings(max_examples=400)
@given(damaged())
def test_a_damaged_config_gives_a_geometry_or_an_error_of_kvarns(config: dict[str, Any]) -> None:
    with contextlib.suppress(KvarnError):
        found = geometry_of(config)
        assert all(spec.elements_per_token >= 0 for spec in found.layers)
        assert found.parameters is None or found.parameters.total >= found.parameters.active > 0


@settings(max_examples=100)
@given(st.recursive(STRANGE, lambda inner: st.dictionaries(st.sampled_from(["model_type", "text_config", "x"]), inner)))
def test_anything_at_all_is_answered(config: Any) -> None:
    with contextlib.suppress(KvarnError):
        geometry_of(config)
