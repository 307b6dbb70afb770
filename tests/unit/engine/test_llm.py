"""The front door, over a tiny model directory."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from kvarn import LLM, EngineOptions, SamplingParams
from kvarn.core.cache_params import CacheParams
from kvarn.core.errors import DoesNotFit, IncompatiblePlan, InvalidRequest, KvarnError, ModelError, UnknownName
from support.dense import dense_greedy
from support.engines import held_blocks
from support.models import ASSISTANT, CONFIGS, USER, tiny_model, write_model_directory

SMALL = EngineOptions(weights="float32", block_size=4, context_tokens=128, max_seqs=8, poison=True)
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(directory: Path) -> LLM:
    return LLM(directory, SMALL)


def expected(text: str, n_tokens: int = 10) -> tuple[int, ...]:
    return tuple(dense_greedy(tiny_model(), list(text.encode()), n_tokens))


def test_generate_keeps_the_order_of_prompts(llm: LLM) -> None:
    texts = ["one", "a second, longer prompt", "3"]
    outputs = llm.generate(texts, GREEDY)
    assert [o.prompt_ids for o in outputs] == [tuple(t.encode()) for t in texts]
    assert [o.completions[0].token_ids for o in outputs] == [expected(t) for t in texts]


@pytest.mark.parametrize("prompt", [[104, 105], (104, 105), np.array([104, 105]), "hi", ["hi"], [[104, 105]]], ids=str)
def test_one_prompt_in_any_form(llm: LLM, prompt: object) -> None:
    (output,) = llm.generate(prompt, GREEDY)  # pyright: ignore[reportArgumentType]
    assert output.completions[0].token_ids == expected("hi")


def test_overrides_are_fields_of_the_params(llm: LLM) -> None:
    (output,) = llm.generate("hi", GREEDY, max_tokens=3)
    assert output.completions[0].token_ids == expected("hi", 3) and output.completions[0].finish_reason == "length"
    with pytest.raises(TypeError, match="max_token"):
        llm.generate("hi", max_token=3)


def test_no_prompts_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_stream_joins_to_the_answer(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    pieces = list(stream)
    (whole,) = llm.generate("hello", GREEDY)
    assert stream.output is not None
    (answer,) = stream.output.completions
    assert (answer.text, answer.token_ids) == (whole.completions[0].text, whole.completions[0].token_ids)
    assert "".join(p.text for p in pieces) == whole.completions[0].text
    assert llm.last_output is stream.output and not llm.engine.has_work


def test_two_streams_and_a_batch_at_once(llm: LLM) -> None:
    first, second = llm.stream("first", GREEDY), llm.stream("the second", GREEDY, max_tokens=16)
    pieces = [next(first), next(second)]
    (between,) = llm.generate("between", GREEDY)
    assert between.completions[0].token_ids == expected("between")
    rest = [[pieces[0], *first], [pieces[1], *second]]
    found = [tuple(t for d in deltas for t in d.token_ids) for deltas in rest]
    assert found == [expected("first"), expected("the second", 16)]


@pytest.mark.parametrize("how", ["close", "with", "break", "never begun"])
def test_leaving_a_stream_frees_its_blocks(llm: LLM, how: str) -> None:
    before = held_blocks(llm.engine)
    if how == "close":
        stream = llm.stream("some words here", GREEDY)
        next(stream)
        stream.close()
        stream.close()
        assert stream.output is not None and stream.output.completions[0].finish_reason == "cancelled"
        assert list(stream) == []
    elif how == "with":
        with llm.stream("some words here", GREEDY) as stream:
            next(stream)
    elif how == "break":
        for _ in llm.stream("some words here", GREEDY):
            break
    else:
        llm.stream("some words here", GREEDY)
    gc.collect()
    assert not llm.engine.has_work and held_blocks(llm.engine) == before
    assert llm.last_output is None or llm.last_output.completions[0].finish_reason == "cancelled"
    assert llm.generate("hi", GREEDY)[0].completions[0].token_ids == expected("hi")


def test_chat_uses_the_models_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert output.prompt_ids == (USER, 104, 105, ASSISTANT)
    assert output.completions[0].token_ids == tuple(dense_greedy(tiny_model(), output.prompt_ids, 10))


def test_an_error_of_the_model_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the model broke")

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.model), "forward", broken)
        with pytest.raises(RuntimeError, match="the model broke"):
            llm.generate(["one", "two"] * 8, GREEDY)
        with pytest.raises(RuntimeError, match="the model broke"):
            next(llm.stream("three", GREEDY))
    assert not llm.engine.has_work and held_blocks(llm.engine) == 0
    assert llm.generate("hi", GREEDY)[0].completions[0].token_ids == expected("hi")


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = [], type(llm.model).forward

    def interrupted(*args: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(type(llm.model), "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], GREEDY)
    llm.engine.cache.check()
    assert not llm.engine.has_work and held_blocks(llm.engine) == 0


def test_two_engines_in_one_process(directory: Path, tmp_path: Path) -> None:
    one, other = LLM(directory, SMALL), LLM(write_model_directory(tmp_path, "gemma3", seed=3), SMALL, kv="float16")
    pieces = [one.stream("hi", GREEDY), other.stream("hi", GREEDY)]
    found = [tuple(t for d in pair for t in d.token_ids) for pair in zip(*zip(*pieces, strict=False), strict=True)]
    assert found[0] == expected("hi")
    assert found[1] == other.generate("hi", GREEDY)[0].completions[0].token_ids != found[0]
    assert {t.dtype for t in one.engine.cache.groups[0].stores[0].tensors()} != {  # pyright: ignore
        t.dtype
        for t in other.engine.cache.groups[0].stores[0].tensors()  # pyright: ignore
    }


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "the prompt is empty"),
        (["fine", ""], "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([1, 260], "token id 260 is outside the vocabulary of 260"),
        ([[-1]], "token id -1 is outside"),
        ([[1, 2.5]], "no token id"),
        (None, "None"),
        ([None], "None"),
        (7, "7"),
    ],
)
def test_bad_prompts_are_refused_and_harm_nobody(llm: LLM, prompt: object, words: str) -> None:
    other = llm.stream("first", GREEDY)
    next(other)
    with pytest.raises(InvalidRequest, match=words) as caught:
        llm.generate(prompt, GREEDY)  # pyright: ignore[reportArgumentType]
    assert caught.value.fixes
    rest = [t for d in other for t in d.token_ids]
    assert tuple(rest) == expected("first")[1:] and not llm.engine.has_work


def test_too_long_for_the_context_or_the_cache(directory: Path, llm: LLM) -> None:
    with pytest.raises(
        DoesNotFit, match=r"120 prompt tokens and 10 new ones exceed the context of 128 tokens"
    ) as caught:
        llm.generate(["fine", "x" * 120], GREEDY)
    assert any("118" in f for f in caught.value.fixes) and not llm.engine.has_work
    small = LLM(directory, SMALL, kv_memory_bytes=6 * 4 * 2 * 2 * 2 * 8 * 4)  # blocks, tokens, layers, K and V, ...
    with pytest.raises(
        DoesNotFit, match=r"29 tokens take 8 blocks of 4 tokens \(8,192 B\); the whole pool has 6 \(6,144 B\)"
    ) as caught:
        small.generate("x" * 20, GREEDY)
    assert any("max_tokens of at most 5" in f for f in caught.value.fixes)
    assert held_blocks(small.engine) == 0
    assert small.generate("x" * 20, GREEDY, max_tokens=5)[0].completions[0].token_ids == expected("x" * 20, 5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cache": "pages"}, UnknownName, "cache mode 'pages'"),
        ({"kv": "float99"}, UnknownName, "KV format 'float99'"),
        ({"kv": "k=float16"}, KvarnError, "k=float16|k=NAME,v=NAME"),
        ({"kv": "=,="}, KvarnError, "=,=|k=NAME,v=NAME"),
        ({"weights": "float99"}, UnknownName, "float99"),
        ({"backend": "abacus"}, UnknownName, "abacus"),
        ({"block_size": 0}, IncompatiblePlan, "block_size is 0"),
        ({"max_seqs": 0}, IncompatiblePlan, "max_seqs is 0"),
        ({"step_tokens": -1}, IncompatiblePlan, "step_tokens is -1"),
        ({"context_tokens": 0}, IncompatiblePlan, "context is 0"),
        ({"residual_tokens": -1}, IncompatiblePlan, "residual_tokens is -1"),
        ({"kv_memory_bytes": 0}, IncompatiblePlan, "0 B"),
        ({"kv_memory_bytes": 10}, DoesNotFit, "10 B"),
        ({"kv_memory_bytes": 1 << 60}, DoesNotFit, "of KV cache; this machine has"),
        ({"threads": 0}, IncompatiblePlan, "threads is 0"),
        ({"threads": 99999}, InvalidRequest, "99999 threads on"),
        ({"fast_memory_bytes": 10}, IncompatiblePlan, "10 B for second forms"),
    ],
)
def test_bad_options_are_refused(directory: Path, options: dict[str, object], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(directory, SMALL, **options)


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(ModelError, match="does not exist"):
        LLM("/no/such/directory")


def test_the_report_counts_what_was_held(llm: LLM) -> None:
    llm.generate("x" * 17, GREEDY, max_tokens=1)
    report = llm.kv_report()
    per_token = 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, dim, bytes
    assert report.bytes_per_token == per_token
    assert (report.blocks_peak, report.logical_bytes) == (5, 17 * per_token)
    assert report.physical_bytes_peak == report.reserved_bytes == 5 * 4 * per_token
    assert report.utilisation == pytest.approx(17 / 20)


def physical_bytes(output: object) -> int:
    trace = output.completions[0].trace  # pyright: ignore[reportAttributeAccessIssue]
    assert trace is not None
    return trace.physical_bytes


@pytest.mark.parametrize("choice", ["int8", CacheParams("int8")], ids=["text", "params"])
def test_one_prompt_in_another_cache(directory: Path, choice: CacheParams | str) -> None:
    """Through all three doors; the engine's own cache stays what it was."""
    llm = LLM(directory, SMALL, also=("int8",))
    text, params = "hello, this is a prompt", SamplingParams(max_tokens=24, ignore_eos=True)
    (full,), (less,) = llm.generate(text, params), llm.generate(text, params, cache=choice)
    assert full.completions[0].token_ids == expected(text, 24)
    assert physical_bytes(less) < 0.6 * physical_bytes(full)
    stream = llm.stream(text, params, cache=choice)
    assert [t for d in stream for t in d.token_ids] == list(less.completions[0].token_ids)
    assert stream.output is not None and physical_bytes(stream.output) == physical_bytes(less)
    messages = [{"role": "user", "content": text}]
    assert physical_bytes(llm.chat(messages, params, cache=choice)) < 0.6 * physical_bytes(llm.chat(messages, params))
    (policy,) = llm.generate(text, params, cache="window:16,sinks=4")
    assert physical_bytes(policy) < 0.8 * physical_bytes(full)
    assert held_blocks(llm.engine) == 0


@pytest.mark.parametrize(
    ("choice", "error", "said"),
    [
        ("int4", IncompatiblePlan, "no pool of int4; this engine has float32, int8"),
        ("int7", UnknownName, "int7"),
        ("window:9999", IncompatiblePlan, "above the context"),
        (CacheParams("int8", "h2o:25%"), IncompatiblePlan, "goes with the policy full"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_had(
    directory: Path, choice: CacheParams | str, error: type[KvarnError], said: str
) -> None:
    llm = LLM(directory, SMALL, also=("int8",))
    for call in (llm.generate, llm.stream):
        with pytest.raises(error, match=said):
            call("hi", GREEDY, cache=choice)
    assert not llm.engine.has_work and held_blocks(llm.engine) == 0


def test_a_context_beyond_the_models_own_is_one_warning(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = CONFIGS["llama"]["max_position_embeddings"]
    LLM(directory, SMALL, context_tokens=own)
    assert not caplog.records
    LLM(directory, SMALL, context_tokens=own + 1)
    assert [r.getMessage() for r in caplog.records] == [
        f"a context of {own + 1} tokens is longer than the {own} that the model was made for: "
        "answers may get worse there"
    ]
