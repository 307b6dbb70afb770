"""lm-eval's own evaluator over a Kvarn model, on a task that lies on the disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvarn import LLM
from support.models import write_model_directory

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is an optional extra")

DOCS = [
    {"question": "The sky is", "choices": ["blue", "a table", "made of wood"], "answer": 0},
    {"question": "Two and two are", "choices": ["nine", "four"], "answer": 1},
    {"question": "A mill grinds", "choices": ["corn", "the sea"], "answer": 0},
    {"question": "Water is", "choices": ["dry", "wet", "loud", "young"], "answer": 1},
]
CHOOSING = """
task: kvarn_choosing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
WRITING = """
task: kvarn_writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    file = tmp_path / "docs.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS), encoding="utf-8")
    for name, text in (("choosing", CHOOSING), ("writing", WRITING)):
        (tmp_path / f"{name}.yaml").write_text(text.format(file=file), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_its_evaluator_runs_from_end_to_end(tasks: Path) -> None:
    from kvarn.evals.lm_eval import KvarnLM  # noqa: PLC0415  (needs lm-eval)

    llm = LLM(write_model_directory(tasks / "model"), weights="float32", context_tokens=128, kv="int8+window:64")
    found = lm_eval.simple_evaluate(
        model=KvarnLM(llm),
        tasks=["kvarn_choosing", "kvarn_writing"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found["results"]["kvarn_choosing"]["acc,none"] == pytest.approx(share_right(llm))
    samples = found["samples"]["kvarn_writing"]
    assert len(samples) == len(DOCS)
    for sample in samples:
        asked = llm.generate(sample["doc"]["question"], max_tokens=4, stop=("\n",))[0].completions[0].text
        assert sample["resps"] == [[asked]]


def share_right(llm: LLM) -> float:
    """Of the questions whose right answer is the likeliest, by the prompt's own log-probabilities."""
    right = 0
    for doc in DOCS:
        sums = [likelihood(llm, doc["question"], f" {choice}") for choice in doc["choices"]]
        assert all(math.isfinite(s) for s in sums)
        right += max(range(len(sums)), key=sums.__getitem__) == doc["answer"]
    return right / len(DOCS)


def likelihood(llm: LLM, context: str, answer: str) -> float:
    output = llm.generate(context + answer, max_tokens=1, prompt_logprobs=0)[0]
    assert output.prompt_logprobs is not None
    begin = len(llm.tokenizer.encode(context))
    return sum(entry.logprob for entry in output.prompt_logprobs[begin:] if entry is not None)
