"""What a case times: decoding alone is timed while all answers grow, and nothing of it stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn.bench.cases import Case, prompt_ids
from kvarn.bench.measure import longest_tokens, run_case
from kvarn.core.options import EngineOptions
from kvarn.engine.llm import LLM
from kvarn.engine.step_plan import Row
from support.models import write_model_directory

OPTIONS = EngineOptions(block_size=4, kv_memory_bytes=4 << 20, context_tokens=64, max_seqs=4, step_tokens=16, threads=1)
DECODE = Case("several", 4, 20, 6, "decode")


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(write_model_directory(tmp_path, "llama"), OPTIONS)


def steps_of(llm: LLM, case: Case, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Row, ...]]:
    steps, step = [], llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: steps.append(result := step()) or result)
    prompts = [[i % 200 for i in ids] for ids in prompt_ids(case)]
    timing = run_case(llm, case, prompts)
    assert timing.prefill_s > 0 and timing.decode_s > 0
    return [result.plan.rows for result in steps]


def test_decoding_is_timed_while_all_answers_grow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = steps_of(llm, DECODE, monkeypatch)[-(DECODE.output_tokens - 1) :]
    assert all([r.n_tokens for r in rows] == [1] * DECODE.streams for rows in timed)
    assert not llm.engine.has_work
    assert max(r.start for rows in timed for r in rows) < longest_tokens(DECODE, OPTIONS.step_tokens)


def test_all_tokens_of_a_batch_are_computed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("batch", 3, 9, 5, "all")
    rows = [r for step in steps_of(llm, case, monkeypatch) for r in step]
    assert sum(r.n_tokens for r in rows) == case.streams * (case.prompt_tokens + case.output_tokens - 1)
    assert longest_tokens(case) == 14
