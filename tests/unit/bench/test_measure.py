"""What a case times: decoding alone is timed while all answers grow, and nothing of it stays behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvarn.bench.cases import Case, prompt_ids
from kvarn.bench.measure import KeptCase, longest_tokens, run_case
from kvarn.bench.workers.run_kvarn import answer_of
from kvarn.core.errors import DoesNotFit
from kvarn.core.options import EngineOptions
from kvarn.engine.engine import StepResult
from kvarn.engine.llm import LLM
from kvarn.engine.step_plan import Row
from support.models import write_model_directory

OPTIONS = EngineOptions(
    block_size=4,
    kv_memory_bytes=4 << 20,
    context_tokens=64,
    max_seqs=4,
    step_tokens=16,
    threads=1,
    prefix_caching=False,
)
DECODE = Case("several", 4, 20, 6, "decode")
KEPT = replace(DECODE, kept=True)
ONE_EACH = [1] * KEPT.streams


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(write_model_directory(tmp_path, "llama"), OPTIONS)


def prompts_of(case: Case) -> list[list[int]]:
    return [[i % 200 for i in ids] for ids in prompt_ids(case)]


def recorded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Row, ...]]:
    """The rows of each step that follows."""
    steps, step = [], llm.engine.step

    def recording() -> StepResult:
        result = step()
        steps.append(result.plan.rows)
        return result

    monkeypatch.setattr(llm.engine, "step", recording)
    return steps


def steps_of(llm: LLM, case: Case, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Row, ...]]:
    steps = recorded(llm, monkeypatch)
    timing = run_case(llm, case, prompts_of(case))
    assert timing.prefill_s > 0 and timing.decode_s > 0
    return steps


def rounds_of(llm: LLM, rounds: int, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[Row, ...]]]:
    """The steps of each round of the kept case."""
    kept, steps, found = KeptCase(llm), recorded(llm, monkeypatch), []
    for _ in range(rounds):
        assert kept.run(KEPT, prompts_of(KEPT)).decode_s > 0
        found.append(list(steps))
        steps.clear()
    return found


def tokens_of(rows: tuple[Row, ...]) -> list[int]:
    return [r.n_tokens for r in rows]


def test_decoding_is_timed_while_all_answers_grow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = steps_of(llm, DECODE, monkeypatch)[-(DECODE.output_tokens - 1) :]
    assert all(tokens_of(rows) == ONE_EACH for rows in timed)
    assert not llm.engine.has_work
    assert max(r.start for rows in timed for r in rows) < longest_tokens(DECODE, OPTIONS.step_tokens)


def test_all_tokens_of_a_batch_are_computed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("batch", 3, 9, 5, "all")
    rows = [r for step in steps_of(llm, case, monkeypatch) for r in step]
    assert sum(r.n_tokens for r in rows) == case.streams * (case.prompt_tokens + case.output_tokens - 1)
    assert longest_tokens(case) == 14


def test_a_kept_case_computes_its_prompts_once_and_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *later = rounds_of(llm, 3, monkeypatch)
    assert sum(map(sum, map(tokens_of, first))) > KEPT.streams * KEPT.prompt_tokens
    for before, steps in zip((first, later[0]), later, strict=True):
        assert [tokens_of(rows) for rows in steps] == [ONE_EACH] * (KEPT.output_tokens - 1)
        assert {r.seq_id: r.start for r in steps[0]} == {r.seq_id: r.start + 1 for r in before[-1]}


@pytest.mark.parametrize("memory_tokens", [4 * 64, 4 * 52])
def test_a_kept_case_starts_over_where_context_or_memory_is_full(
    memory_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model_directory(tmp_path, "llama")
    token_bytes = LLM(directory, OPTIONS).plan.bytes_per_token
    llm = LLM(directory, replace(OPTIONS, kv_memory_bytes=memory_tokens * token_bytes))
    rounds = rounds_of(llm, 10, monkeypatch)
    filled = [any(max(tokens_of(rows)) > 1 for rows in steps) for steps in rounds]
    assert filled[:2] == [True, False] and 1 < sum(filled) < len(rounds)
    assert all(tokens_of(rows) == ONE_EACH for steps in rounds for rows in steps[-(KEPT.output_tokens - 1) :])
    longest = max(r.start + 1 for steps in rounds for rows in steps for r in rows)
    assert longest <= memory_tokens // KEPT.streams < longest + KEPT.output_tokens


def test_a_kept_case_that_the_memory_does_not_hold_is_refused(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path, "llama")
    token_bytes = LLM(directory, OPTIONS).plan.bytes_per_token
    llm = LLM(directory, replace(OPTIONS, kv_memory_bytes=KEPT.streams * 24 * token_bytes))
    with pytest.raises(DoesNotFit, match="cache is too small"):
        KeptCase(llm).run(KEPT, prompts_of(KEPT))
    assert not llm.engine.has_work


def test_another_case_ends_the_streams_of_a_kept_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, other = KeptCase(llm), Case("batch", 2, 9, 5, "all")
    answer_of(llm, kept, KEPT, prompts_of(KEPT))
    steps = recorded(llm, monkeypatch)
    answer_of(llm, kept, other, prompts_of(other))
    assert max(len(rows) for rows in steps) == other.streams and not llm.engine.has_work
    assert answer_of(llm, kept, KEPT, prompts_of(KEPT))["decode_s"] > 0
