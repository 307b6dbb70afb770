"""Write src/kvarn/core/geometry/defaults.json: what transformers' config classes assume where a config.json is silent.

Run after a new architecture or a new transformers release: `python scripts/geometry_defaults.py`. A test compares the
file with the installed transformers.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "src/kvarn/core/geometry/defaults.json"
# Nothing that sizes a model: training, tokens, numerics, task heads, parallel plans.
SKIPPED = re.compile(
    r"_token_id|_token_index|dropout|initializer|pdrop|_coef|^init_|_init$|summary|_plan$|id2label|label2id|extra_|"
    r"sub_configs|attribute_map|base_config|model_type|transformers_version|architectures|output_|return_|problem_type|"
    r"chunk_size_feed|use_cache|_eps$|epsilon|^eps$|hidden_act|activation|dtype|pretraining_tp|jitter|vision_|audio_|"
    r"image_|video_|rope_param|theta|jet_|multiplier|scaling|_factor$|softcap|time_step|is_decoder|norm_topk"
)


def defaults_of(config_class: type) -> dict[str, Any]:
    """Integers, flags, names and lists that the class sets by default, None and irrelevant keys left out."""
    found: dict[str, Any] = {}
    for name, spec in getattr(config_class, "__dataclass_fields__", {}).items():
        value = spec.default if spec.default is not dataclasses.MISSING else None
        if value is None and spec.default_factory is not dataclasses.MISSING:
            value = spec.default_factory()
        keep = (
            isinstance(value, (bool, int, str, list, tuple)) and not name.startswith("_") and not SKIPPED.search(name)
        )
        if keep:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def collect() -> dict[str, Any]:
    """The file's content for the installed transformers."""
    import transformers  # noqa: PLC0415

    from kvarn.core.geometry.build import _families  # noqa: PLC0415

    mapping = transformers.CONFIG_MAPPING
    known = {name: defaults_of(mapping[name]) for name in sorted(_families()) if name in mapping}
    return {
        "source": f"config classes of Hugging Face transformers {transformers.__version__} (Apache-2.0)",
        "transformers": transformers.__version__,
        "model_types": {name: values for name, values in known.items() if values},
    }


def render(content: dict[str, Any]) -> str:
    """One architecture a line, so that a diff shows which one changed."""
    head = ",\n".join(f" {json.dumps(k)}: {json.dumps(content[k])}" for k in ("source", "transformers"))
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in content["model_types"].items())
    return f'{{\n{head},\n "model_types": {{\n{lines}\n }}\n}}\n'


if __name__ == "__main__":
    TARGET.write_text(render(collect()), "utf-8")
    sys.stdout.write(f"{TARGET}: {TARGET.stat().st_size} bytes\n")
