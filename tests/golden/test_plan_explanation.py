"""The planner's report and explanation, word for word. Regenerate: python tests/golden/test_plan_explanation.py"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvarn.core.geometry import ModelGeometry
from kvarn.planner.api import ask
from kvarn.planner.compute import build_case, make_plan
from kvarn.planner.engines import load_engine
from kvarn.planner.explain import explain
from kvarn.planner.report import render
from kvarn.planner.roofline import Device
from kvarn.planner.sources import load_geometry

HERE = Path(__file__).parent
DEVICE = Device("an 80 GB device", 80 * 10**9, 3.35e12, {"bf16": 989e12}, source="given by the test")
CASES = {
    "llama-3.1-8b": ("llama-3.1-8b", "kvarn", "128k"),
    "gemma-3-27b": ("gemma-3-27b", "vllm@0.20", "32k"),
    "deepseek-v3": ("deepseek-v3", "sglang", "32k"),
    "qwen3-next-80b": ("qwen3-next-80b-a3b", "llama.cpp", "32k"),
}


def text_of(name: str) -> str:
    model, engine, context = CASES[name]
    geometry: ModelGeometry = replace(load_geometry(model, fetch=False), provenance="the catalogue", notes=())
    profile, version = load_engine(engine)
    case = build_case(geometry, profile, ask(geometry, profile, version, context=context))
    plan = make_plan(case, DEVICE)
    return render(plan) + "\n\n" + explain(case, plan) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_explanation(name: str) -> None:
    assert text_of(name) == (HERE / f"plan_{name}.txt").read_text("utf-8")


if __name__ == "__main__":
    for case_name in CASES:
        (HERE / f"plan_{case_name}.txt").write_text(text_of(case_name), "utf-8")
