"""The official client against a real server over a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import openai
import pytest

from kvarn import SamplingParams
from kvarn.engine.llm import LLM
from support.engines import make_engine, serve
from support.models import BOS, byte_tokenizer, write_model_directory
from support.serving import MODEL, Running, client, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture
def api(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
    assert server.idle()


PROMPT = "a mill turns"


def test_models(api: openai.OpenAI) -> None:
    assert [m.id for m in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")


def test_completion_equals_the_engine(api: openai.OpenAI, server: Running) -> None:
    got = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    ids = byte_tokenizer().encode(PROMPT)
    watch = serve(make_engine("llama"), [(ids, SamplingParams(max_tokens=12))])
    expected = watch.outputs["0"].completions[0]
    assert got.choices[0].text == expected.text
    assert got.choices[0].finish_reason == expected.finish_reason
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(ids), len(expected.token_ids))
    assert got.usage.prompt_tokens_details is not None
    assert got.usage.prompt_tokens_details.cached_tokens is not None


def test_stream_joins_to_the_whole(api: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0.9, "seed": 7, "n": 2}
    whole = api.completions.create(**asked)
    texts = ["", ""]
    reasons = {}
    for chunk in api.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == [c.text for c in whole.choices]
    assert reasons == {c.index: c.finish_reason for c in whole.choices}


def test_chat(api: openai.OpenAI) -> None:
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    got = api.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8, temperature=0)
    same = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    again = api.chat.completions.create(model=MODEL, messages=same, max_tokens=8, temperature=0)
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].message.content == again.choices[0].message.content
    stream = api.chat.completions.create(
        model=MODEL, messages=same, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == got.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8
    assert all(c.usage is None for c in chunks[:-1])


def test_conversation_goes_on_with_the_clients_own_message(api: openai.OpenAI) -> None:
    messages: list = [{"role": "user", "content": "hi"}]
    got = api.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    messages += [got.choices[0].message, {"role": "user", "content": "more"}]
    assert api.chat.completions.create(model=MODEL, messages=messages, max_tokens=4).choices


def test_chat_logprobs(api: openai.OpenAI) -> None:
    got = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
        temperature=0,
    )
    content = got.choices[0].logprobs and got.choices[0].logprobs.content
    assert content is not None and len(content) == 5
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0


def test_completion_logprobs_and_echo(api: openai.OpenAI) -> None:
    got = api.completions.create(model=MODEL, prompt="abc", max_tokens=0, echo=True, logprobs=2, temperature=0)
    choice = got.choices[0]
    assert choice.text == "abc"
    found = choice.logprobs
    assert found is not None
    assert found.tokens == ["a", "b", "c"] and found.text_offset == [0, 1, 2]
    assert found.token_logprobs is not None and found.top_logprobs is not None
    assert found.token_logprobs[0] is None and all(p <= 0 for p in found.token_logprobs[1:])
    assert all(p is None or 2 <= len(p) <= 3 for p in found.top_logprobs)


def test_prompts_as_a_list_keep_their_order(api: openai.OpenAI) -> None:
    single = [api.completions.create(model=MODEL, prompt=p, max_tokens=6, temperature=0).choices[0].text for p in "abc"]
    many = api.completions.create(model=MODEL, prompt=list("abc"), max_tokens=6, temperature=0)
    assert [c.text for c in many.choices] == single
    ids = [byte_tokenizer().encode(p) for p in "abc"]
    as_ids = api.completions.create(model=MODEL, prompt=ids, max_tokens=6, temperature=0)
    assert [c.text for c in as_ids.choices] == single
    one = api.completions.create(model=MODEL, prompt=ids[1], max_tokens=6, temperature=0)
    assert one.choices[0].text == single[1]


def test_logit_bias_and_stop(api: openai.OpenAI) -> None:
    got = api.completions.create(model=MODEL, prompt="q", max_tokens=6, logit_bias={str(ord("z")): 100}, temperature=0)
    assert got.choices[0].text == "zzzzzz"
    got = api.completions.create(model=MODEL, prompt="q", logit_bias={"122": 100}, stop=["zzz"], temperature=0)
    assert (got.choices[0].text, got.choices[0].finish_reason) == ("", "stop")


def test_penalties_change_the_answer(api: openai.OpenAI) -> None:
    got = api.completions.create(
        model=MODEL, prompt="q", max_tokens=4, logit_bias={"122": 60, "121": 59}, frequency_penalty=2, temperature=0
    )
    assert sorted(got.choices[0].text[:2]) == ["y", "z"]


def test_constrained_answers(api: openai.OpenAI) -> None:
    got = api.completions.create(
        model=MODEL, prompt="q", max_tokens=60, extra_body={"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, n=3
    )
    for choice in got.choices:
        assert re.fullmatch("[a-c]{3}-[0-9]{2}", choice.text)
        assert choice.finish_reason == "stop"
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    for stream in (False, True):
        answer = api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            max_tokens=100,
            seed=3,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            logit_bias={str(ord(" ")): -100, str(ord("\n")): -100, str(ord("\t")): -100, str(ord("\r")): -100},
            stream=stream,
        )
        text = (
            "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
        )
        assert isinstance(json.loads(text)["ok"], bool)


def test_seed_repeats(api: openai.OpenAI) -> None:
    texts = {
        api.completions.create(model=MODEL, prompt="r", max_tokens=16, temperature=1.5, seed=5).choices[0].text
        for _ in range(3)
    }
    assert len(texts) == 1


def test_kvarn_field(api: openai.OpenAI) -> None:
    got = api.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, extra_body={"kvarn": True, "kv": {"policy": None}}
    )
    report = got.model_extra["kvarn"] if got.model_extra else {}
    assert report["kv"]["bytes"] > 0 and report["kv"]["logical_bytes"] > 0
    assert report["kv"]["format"] == "float32"
    assert report["waits"] == [] and report["preemptions"] == []
    assert report["timings"][0]["ttft_s"] > 0


@pytest.mark.parametrize(
    "kv", ["window:16,sinks=4", {"policy": "window:16,sinks=4"}, {"policy": "window:16,sinks=2", "format": "float32"}]
)
def test_a_request_chooses_its_policy(api: openai.OpenAI, server: Running, kv: object) -> None:
    """It holds less at its end than one without, and says so; others are not touched."""
    asked = {"model": MODEL, "prompt": "p" * 60, "max_tokens": 20, "temperature": 0}
    plain = api.completions.create(**asked, extra_body={"kvarn": True, "ignore_eos": True})
    less = api.completions.create(**asked, extra_body={"kv": kv, "ignore_eos": True})
    again = api.completions.create(**asked, extra_body={"kvarn": True, "ignore_eos": True})
    full, window = (r.model_extra["kvarn"]["kv"] for r in (plain, less))
    assert full["policy"] == "full"
    assert window["policy"] == (kv if isinstance(kv, str) else kv["policy"])
    assert window["bytes"] < full["bytes"] / 2
    assert window["ratio"] > 2 * full["ratio"]
    assert again.choices[0].text == plain.choices[0].text


ERRORS = [
    ({"model": "nope"}, openai.NotFoundError, "not served"),
    ({"prompt": ""}, openai.BadRequestError, "empty"),
    ({"prompt": []}, openai.BadRequestError, "empty"),
    ({"prompt": "x" * 500}, openai.BadRequestError, "must fit"),
    ({"prompt": [99999]}, openai.BadRequestError, "vocabulary"),
    ({"max_tokens": 10_000}, openai.BadRequestError, "context"),
    ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ({"top_p": 0}, openai.BadRequestError, "top_p"),
    ({"n": 0}, openai.BadRequestError, "n:"),
    ({"stop": ["a"] * 65}, openai.BadRequestError, "stop strings"),
    ({"stop": [""]}, openai.BadRequestError, "stop"),
    ({"suffix": "x"}, openai.BadRequestError, "suffix"),
    ({"best_of": 2}, openai.BadRequestError, "best_of"),
    ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
    ({"logit_bias": {"5000": 1}}, openai.BadRequestError, "logit_bias"),
    ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense"),
    ({"extra_body": {"kv": {"format": "int1"}}}, openai.BadRequestError, "int1"),
    ({"extra_body": {"kv": {"format": "int8"}}}, openai.BadRequestError, "this server's cache has 'float32'"),
    ({"extra_body": {"kv": {"policy": "nope"}}}, openai.BadRequestError, "nope"),
    ({"extra_body": {"kv": {"policy": "int8"}}}, openai.BadRequestError, "names a format"),
    ({"extra_body": {"kv": {"format": "h2o:25%"}}}, openai.BadRequestError, "is no format"),
    ({"extra_body": {"kv": "window:9999"}}, openai.BadRequestError, "above the context"),
    ({"extra_body": {"kv": "window:x"}}, openai.BadRequestError, "no budget"),
    ({"extra_body": {"kv": "adakv:25%"}}, openai.BadRequestError, "cuts the cache by head"),
    ({"extra_body": {"kv": ""}}, openai.BadRequestError, "no cache choice"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, openai.BadRequestError, "compile"),
    ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options"),
]


@pytest.mark.parametrize(("change", "kind", "why"), ERRORS, ids=[json.dumps(e[0])[:40] for e in ERRORS])
def test_errors_in_openais_form(api: openai.OpenAI, server: Running, change: dict, kind: type, why: str) -> None:
    """Refused before a block is spent, streamed or not."""
    for stream in (False, True):
        if stream and "stream_options" in change:
            continue
        with pytest.raises(kind, match=re.escape(why)) as caught:
            api.completions.create(**{"model": MODEL, "prompt": "x", "stream": stream, **change})
        assert isinstance(caught.value, openai.APIStatusError)
        body = caught.value.body
        assert isinstance(body, dict) and {"message", "type", "param", "code"} <= set(body)
    assert server.held()[0] == 0


def test_a_stream_that_ends_early_is_cancelled(api: openai.OpenAI, server: Running) -> None:
    stream = api.completions.create(
        model=MODEL, prompt="x", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert server.idle()


def test_tokenize_and_back(server: Running) -> None:
    with client(server) as http:
        got = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
        assert got["tokens"] == byte_tokenizer().encode("hé")
        assert got["count"] == len(got["tokens"]) == len(got["token_strs"])
        chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
        assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"] == "<|user|>hi<|assistant|>"
        assert http.post("/detokenize", json={"tokens": [BOS, 104]}).json()["prompt"].endswith("h")
        assert http.post("/tokenize", json={}).status_code == 400


def test_llm_facade_gives_the_same(api: openai.OpenAI, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The two doors to the engine agree."""
    llm = LLM(str(write_model_directory(tmp_path_factory.mktemp("model"))), weights="float32", block_size=4)
    for seed in (1, 2):
        ours = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=10, temperature=0.8, seed=seed)
        theirs = llm.generate(PROMPT, max_tokens=10, temperature=0.8, seed=seed)[0]
        assert ours.choices[0].text == theirs.completions[0].text


def test_policies_by_head_where_the_server_was_told() -> None:
    """`also` makes room for them; the server's own requests stay full."""
    with running_server(also=("adakv:25%",)) as other:
        with client(other) as http:
            body = {"prompt": "p" * 60, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "kvarn": True}
            less = http.post("/v1/completions", json={**body, "kv": "adakv:25%,query_tokens=8"}).json()
            full = http.post("/v1/completions", json=body).json()
        assert other.idle()
    assert less["kvarn"]["kv"]["policy"] == "adakv:25%,query_tokens=8"
    assert less["kvarn"]["kv"]["bytes"] < full["kvarn"]["kv"]["bytes"]
