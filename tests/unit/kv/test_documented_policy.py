"""The policy that docs/policies.md writes, as a file found by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvarn import LLM, EngineOptions
from kvarn.kv import policies
from kvarn.kv.policies.base import policy_names
from support.models import write_model_directory

PAGE = Path(__file__).parents[3] / "docs" / "policies.md"


def test_the_documented_policy_runs_and_lets_memory_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "vnorm.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path / "policies")])
    assert "vnorm" in policy_names()
    options = EngineOptions(weights="float32", block_size=4, context_tokens=256, max_seqs=1, poison=True)
    llm = LLM(write_model_directory(tmp_path / "model"), options, kv="vnorm:25%,recent=4")
    (answer,) = llm.generate("x" * 120, max_tokens=8, ignore_eos=True)
    (trace,) = (c.trace for c in answer.completions)
    assert trace is not None
    assert len(answer.completions[0].token_ids) == 8
    assert trace.physical_bytes < trace.logical_bytes / 2
