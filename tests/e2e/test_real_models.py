"""The two short names against transformers in float32 on the same GGUF: greedy ids in several languages, perplexity."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvarn import LLM
from kvarn.core.errors import FetchError
from kvarn.core.files import ModelFiles
from kvarn.hub import resolve

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = {
    "English": "The history of the water mill begins in",
    "French": "La capitale de la France est une ville où",
    "German": "Die Mühle am Bach wurde im Jahre",
    "Spanish": "Había una vez en un pueblo lejano",
    "Swedish": "En kvarn är en byggnad där man",
    "Russian": "Москва — это город, который",
    "Chinese": "今天天气很好,我们去",
    "Japanese": "昔々あるところに",
    "Arabic": "كان يا ما كان في قديم الزمان",
    "Python": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "arithmetic": "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
}
NEW_TOKENS = 24
TEXT_TOKENS = 2000


def fetched(name: str) -> ModelFiles:
    try:
        return resolve(name, fetch=False)
    except FetchError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def pair(request: pytest.FixtureRequest) -> tuple[LLM, Any]:
    found = fetched(request.param)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        found.path.parent, gguf_file=found.path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return LLM(found, weights="float32", kv="float32", context_tokens=4096), theirs


def prompt_ids(ours: LLM) -> list[list[int]]:
    return [ours.tokenizer.encode(text) for text in PROMPTS.values()]


def test_greedy_ids_equal_transformers(pair: tuple[LLM, Any]) -> None:
    """All prompts in one batch here, one by one there."""
    ours, theirs = pair
    prompts = prompt_ids(ours)
    outputs = ours.generate(prompts, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for language, ids, output in zip(PROMPTS, prompts, outputs, strict=True):
        expected = theirs.generate(
            torch.tensor([ids]),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )[0, len(ids) :]
        assert list(output.completions[0].token_ids) == expected.tolist(), language


def test_perplexity_equals_transformers(pair: tuple[LLM, Any]) -> None:
    ours, theirs = pair
    text = (files("kvarn.evals") / "texts" / "alice.txt").read_text("utf-8")
    ids = ours.tokenizer.encode(text)[:TEXT_TOKENS]
    assert len(ids) == TEXT_TOKENS
    output = ours.generate([ids], max_tokens=1, prompt_logprobs=0)[0]
    assert output.prompt_logprobs is not None
    got = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
    assert len(got) == TEXT_TOKENS - 1
    perplexity, expected = math.exp(-sum(got) / len(got)), math.exp(negative_log_likelihood(theirs, ids))
    assert 1.5 < expected < 100
    assert perplexity == pytest.approx(expected, rel=1e-3)


@torch.inference_mode()
def negative_log_likelihood(theirs: Any, ids: list[int]) -> float:
    """Mean over all tokens but the first, in nats; the logits made in pieces, since 262,144 x 2,000 are 2 GB."""
    hidden = theirs.model(torch.tensor([ids])).last_hidden_state[0, :-1]
    total = 0.0
    for rows, targets in zip(hidden.split(256), torch.tensor(ids[1:]).split(256), strict=True):
        total += float(torch.nn.functional.cross_entropy(theirs.lm_head(rows), targets, reduction="sum"))
    return total / (len(ids) - 1)


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_bfloat16_perplexity_is_near(name: str, tmp_path: Path) -> None:
    """Rounded weights and cache cost little: within 2% of float32's perplexity."""
    found = fetched(name)
    ids: list[int] = []
    results = []
    for weights in ("float32", "bfloat16"):
        llm = LLM(found, weights=weights, context_tokens=1024)
        ids = ids or llm.tokenizer.encode((files("kvarn.evals") / "texts" / "alice.txt").read_text("utf-8"))[:600]
        output = llm.generate([ids], max_tokens=1, prompt_logprobs=0)[0]
        assert output.prompt_logprobs is not None
        results.append(sum(entry.logprob for entry in output.prompt_logprobs if entry is not None) / (len(ids) - 1))
    assert math.exp(abs(results[0] - results[1])) < 1.02
