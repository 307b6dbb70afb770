"""The engine over tiny models: what comes out, what is held, what harms whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvarn.core.errors import DoesNotFit, InvalidRequest
from kvarn.core.requests import RequestOutput, SamplingParams
from kvarn.engine.engine import Engine
from kvarn.engine.randomness import uniform
from support.dense import dense_greedy, dense_logits
from support.engines import BLOCK, Watch, answers, held_blocks, make_engine, serve
from support.models import CONFIGS, byte_tokenizer, tiny_model

PROMPT = list(b"The stone turns slowly.")
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.2, seed=5)
MODELS = tuple(CONFIGS)


def first(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> RequestOutput:
    return serve(engine, [(prompt, params)]).outputs["0"]


# -- n > 1 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", MODELS)
def test_further_completions_are_drawn_by_seed_completion_and_position(model: str) -> None:
    """Against a direct computation: everything computed anew, one draw by inverting the distribution."""
    output = first(make_engine(model), replace(SAMPLED, n=3, max_tokens=10))
    assert len({c.token_ids for c in output.completions}) == 3
    for index, completion in enumerate(output.completions):
        text = list(PROMPT)
        for position in range(len(PROMPT), len(PROMPT) + 10):
            probabilities = torch.softmax(dense_logits(tiny_model(model), text)[-1].double() / 1.2, -1).numpy()
            text.append(int(np.searchsorted(np.cumsum(probabilities), uniform(5, index, position), side="right")))
        assert completion.token_ids == tuple(text[len(PROMPT) :])


def test_further_completions_share_the_prompts_blocks() -> None:
    engine, n = make_engine(), 5
    watch = Watch(engine)
    engine.add_request("0", PROMPT, replace(SAMPLED, n=n, max_tokens=2 * BLOCK))
    watch.step()
    prompt_blocks = -(-len(PROMPT) // BLOCK)
    assert held_blocks(engine) == prompt_blocks, "completions took blocks before they wrote"
    watch.step()
    assert len(PROMPT) % BLOCK, "the last block must be shared in part"
    assert held_blocks(engine) == prompt_blocks - 1 + n, "each completion owns its last block only"
    memory = engine.cache.memory()
    assert memory.sequences == n and memory.tokens == n * (len(PROMPT) + 1)
    assert memory.physical_bytes < memory.logical_bytes / 2
    watch.finish()
    assert held_blocks(engine) == 0


@pytest.mark.parametrize("n", [2, 7])
def test_more_completions_than_the_engine_runs_at_once(n: int) -> None:
    asked = [(PROMPT, replace(SAMPLED, n=n)), (PROMPT[:5], GREEDY)]
    assert answers(make_engine(max_seqs=3), asked) == answers(make_engine(), asked)


def test_completions_end_apart() -> None:
    plain = first(make_engine(), replace(SAMPLED, n=4))
    stop = plain.completions[2].token_ids[3]
    output = first(make_engine(), replace(SAMPLED, n=4, stop_token_ids=(stop,)))
    for before, after in zip(plain.completions, output.completions, strict=True):
        cut = before.token_ids.index(stop) + 1 if stop in before.token_ids else len(before.token_ids)
        assert after.token_ids == before.token_ids[:cut]
        assert after.finish_reason == ("stop" if stop in before.token_ids else "length")


# -- log-probabilities ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step_tokens", [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 512])
def test_logprobs_equal_a_direct_computation(step_tokens: int) -> None:
    params = replace(SAMPLED, logprobs=3, prompt_logprobs=0, max_tokens=6)
    output = first(make_engine(step_tokens=step_tokens), params)
    (completion,) = output.completions
    every = [*PROMPT, *completion.token_ids]
    exact = torch.log_softmax(dense_logits(tiny_model(), every).double(), -1)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    found = [*output.prompt_logprobs[1:], *(completion.logprobs or ())]
    assert len(found) == len(every) - 1
    for at, (line, got) in enumerate(zip(exact, found, strict=False)):
        assert got is not None and got.token_id == every[at + 1]
        assert got.logprob == pytest.approx(float(line[got.token_id]), abs=1e-4)
        assert got.rank == 1 + int((line > line[got.token_id]).sum())
        assert len(got.top) == (0 if at + 1 < len(PROMPT) else 3)


def test_logprobs_of_one_token_prompt() -> None:
    assert first(make_engine(), replace(GREEDY, prompt_logprobs=1), [7]).prompt_logprobs == (None,)


def test_no_logprobs_unless_asked() -> None:
    output = first(make_engine(), GREEDY)
    assert output.prompt_logprobs is None and output.completions[0].logprobs is None


def test_streamed_logprobs_are_the_completions() -> None:
    watch = serve(make_engine(), [(PROMPT, replace(SAMPLED, n=2, logprobs=1))])
    for completion in watch.outputs["0"].completions:
        assert completion.logprobs == tuple(x for d in watch.deltas if d.index == completion.index for x in d.logprobs)


# -- how answers end --------------------------------------------------------------------------------------------------
def end_token() -> tuple[int, int]:
    """(a token that the greedy answer holds, where it stands first)."""
    tokens = dense_greedy(tiny_model(), PROMPT, 16)
    at = next(i for i in range(4, 16) if tokens.index(tokens[i]) == i)
    return tokens[at], at


def test_the_models_end_token_ends_the_answer_unless_ignored() -> None:
    token, at = end_token()
    tokenizer = byte_tokenizer(end_ids=(token,))
    ended = first(make_engine(tokenizer=tokenizer), replace(GREEDY, ignore_eos=False)).completions[0]
    assert (ended.finish_reason, len(ended.token_ids), ended.token_ids[-1]) == ("stop", at + 1, token)
    assert ended.text == tokenizer.decode(ended.token_ids[:-1], continuing=True)
    ignored = first(make_engine(tokenizer=tokenizer), GREEDY).completions[0]
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 16)


def test_stop_tokens_end_the_answer_even_if_the_models_are_ignored() -> None:
    token, at = end_token()
    ended = first(make_engine(), replace(GREEDY, stop_token_ids=(token,))).completions[0]
    assert (ended.finish_reason, len(ended.token_ids)) == ("stop", at + 1)


def biased_to(text: bytes) -> tuple[list[int], SamplingParams, Callable[[Engine], None]]:
    """A request whose answer is `text`: each step's logits are replaced by that step's byte."""

    def force(engine: Engine) -> None:
        said = iter(text)

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(len(hidden), engine.model.vocab_size)
            out[:, next(said)] = 1.0
            return out

        engine.model.logits = logits  # pyright: ignore[reportAttributeAccessIssue]

    return PROMPT, replace(GREEDY, max_tokens=len(text)), force


@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("grain and flour", ("and",), "grain ", "stop"),  # the stop string is three tokens
        ("grain and flour", ("r and f", "zz"), "grain and flour", "length"),
        ("grain and flour", ("flour",), "grain and ", "stop"),
        ("grain and flour", ("flours",), "grain and flour", "length"),  # held back, then given out
        ("aaaaab", ("aab",), "aaa", "stop"),  # its beginning repeats
        ("grain", ("grain",), "", "stop"),
        ("grain", ("ain", "rain"), "g", "stop"),  # both end at once: the longest
        ("ünï→cödé €", ("→c",), "ünï", "stop"),  # characters of several tokens
        ("ab€", ("€",), "ab", "stop"),
        ("mill", ("\n",), "mill", "length"),
    ],
)
def test_stop_strings_never_leak(
    text: str, stop: tuple[str, ...], expected: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, params, force = biased_to(text.encode())
    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "logits", None, raising=False)  # so that it is put back
        force(engine)
        watch = serve(engine, [(prompt, replace(params, stop=stop))])
    completion = watch.outputs["0"].completions[0]
    assert (completion.text, completion.finish_reason) == (expected, reason)
    said = ""
    for delta in watch.deltas:
        said += delta.text
        assert expected.startswith(said), "a piece of the stop string leaked"


def test_broken_utf8_never_leaks_half_a_character() -> None:
    """Random bytes: the joined stream is the text (checked by `finish`), and equals one decoding of all bytes."""
    for seed in range(4):
        completion = first(make_engine(), replace(SAMPLED, seed=seed, max_tokens=60)).completions[0]
        raw = bytes(t for t in completion.token_ids if t < 256)
        whole = raw.decode("utf-8", errors="replace")
        assert whole.startswith(completion.text) and len(whole) - len(completion.text) <= 1


# -- seeds ------------------------------------------------------------------------------------------------------------
def test_a_seed_gives_the_same_whatever_else_runs() -> None:
    alone = answers(make_engine(), [(PROMPT, SAMPLED)])[0]
    crowd = [(PROMPT[i:], replace(SAMPLED, seed=i, temperature=0.5 + i / 4)) for i in range(6)]
    assert answers(make_engine(step_tokens=9), [*crowd, (PROMPT, SAMPLED)])[-1] == alone
    assert answers(make_engine(), [(PROMPT, replace(SAMPLED, seed=6))])[0] != alone


def test_without_a_seed_answers_differ() -> None:
    asked = [(PROMPT, replace(SAMPLED, seed=None))] * 3
    assert len({tuple(a) for a in answers(make_engine(), asked)}) > 1


# -- cancel, errors, room ---------------------------------------------------------------------------------------------
def run_steps(watch: Watch, n: int) -> None:
    for _ in range(n):
        watch.step()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6, 9])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mode", ["paged", "contiguous", "none"])
def test_cancel_at_any_time(mode: str, n: int, steps: int) -> None:
    """Waiting, in the middle of the prompt, with completions unborn, decoding: the blocks are free on return."""
    engine = make_engine(cache=mode, step_tokens=8, max_seqs=4)
    watch = Watch(engine)
    engine.add_request("stays", PROMPT[:9], GREEDY)
    engine.add_request("goes", PROMPT, replace(SAMPLED, n=n))
    run_steps(watch, steps)
    output = engine.cancel("goes")
    engine.cache.check()
    assert output is not None and {c.finish_reason for c in output.completions} == {"cancelled"}
    assert engine.cancel("goes") is None and engine.cancel("never was") is None
    with pytest.raises(KeyError):
        engine.request("goes")
    watch.finish()
    assert list(watch.outputs) == ["stays"] and held_blocks(engine) == 0
    assert watch.outputs["stays"].completions[0].token_ids == tuple(dense_greedy(tiny_model(), PROMPT[:9], 16))
    last = [d for d in watch.deltas if d.request_id == "goes" and d.finish_reason]
    assert sorted(d.index for d in last) == list(range(n))


def test_cancel_while_preempted() -> None:
    engine = make_engine(blocks=20)
    watch = Watch(engine)
    for begin, name in enumerate("abcd"):  # different prompts: equal ones would share their blocks
        engine.add_request(name, PROMPT[begin : begin + 5], replace(GREEDY, max_tokens=60))
    while not watch.preemptions:
        assert engine.has_work, "all went through without a preemption"
        watch.step()
    victim = watch.steps[-1].plan.preempted[0].seq_id
    assert engine.cancel("abcd"[victim]) is not None
    watch.finish()
    assert held_blocks(engine) == 0 and sorted(watch.outputs) == sorted(set("abcd") - {"abcd"[victim]})


def broken_at(call: int, error: BaseException, forward: Callable[..., Any]) -> Callable[..., Any]:
    calls = []

    def forward_or_break(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            forward(*args)  # what a step wrote must not count
            raise error
        return forward(*args)

    return forward_or_break


@pytest.mark.parametrize("what", ["forward", "logits"])
@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("mode", ["paged", "contiguous", "none"])
def test_a_passing_error_of_a_shared_step_ends_nobody(
    mode: str, call: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(PROMPT, replace(SAMPLED, n=2)), (PROMPT[:7], GREEDY), (PROMPT[:3], GREEDY)]
    expected = answers(make_engine(cache=mode), asked)
    engine = make_engine(cache=mode)
    monkeypatch.setattr(engine.model, what, broken_at(call, ValueError("boom"), getattr(engine.model, what)))
    assert answers(engine, asked) == expected
    assert held_blocks(engine) == 0


def test_an_interrupted_step_can_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(make_engine(), [(PROMPT, SAMPLED), (PROMPT[:4], GREEDY)])
    engine = make_engine()
    engine.add_request("0", PROMPT, SAMPLED)
    engine.add_request("1", PROMPT[:4], GREEDY)
    watch = Watch(engine)
    for call in (1, 3):
        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "forward", broken_at(call, KeyboardInterrupt(), engine.model.forward))
            with pytest.raises(KeyboardInterrupt):
                watch.finish()
        engine.cache.check()
    watch.finish()
    assert [[c.token_ids for c in watch.outputs[r].completions] for r in "01"] == expected


@pytest.mark.parametrize("mode", ["paged", "contiguous"])
def test_refused_requests_cost_nothing_and_harm_nobody(mode: str) -> None:
    engine = make_engine(cache=mode, blocks=33 if mode == "contiguous" else 12)
    watch = Watch(engine)
    engine.add_request("fine", PROMPT[:9], GREEDY)
    watch.step()
    before = held_blocks(engine)
    refused: list[tuple[list[int], SamplingParams, type[Exception], str]] = [
        ([], GREEDY, InvalidRequest, "empty"),
        ([0, 260], GREEDY, InvalidRequest, "token id 260 is outside the vocabulary of 260"),
        ([-1], GREEDY, InvalidRequest, "token id -1"),
        ([1.5], GREEDY, InvalidRequest, "no token id"),  # pyright: ignore[reportAssignmentType]
        (["a"], GREEDY, InvalidRequest, "no token id"),  # pyright: ignore[reportAssignmentType]
        ([1], replace(GREEDY, logit_bias={999: 1.0}), InvalidRequest, "token id 999"),
        ([1] * 113, GREEDY, DoesNotFit, "113 prompt tokens and 16 new ones exceed the context of 128"),
        ([1], replace(GREEDY, max_tokens=128), DoesNotFit, "context of 128"),
    ]
    if mode == "paged":
        refused.append(([1] * 40, GREEDY, DoesNotFit, "55 tokens take 14 blocks"))
    for ids, params, error, words in refused:
        with pytest.raises(error, match=words):
            engine.add_request("bad", ids, params)
        assert held_blocks(engine) == before
        engine.cache.check()
    with pytest.raises(InvalidRequest, match="'fine' is in use"):
        engine.add_request("fine", [1], GREEDY)
    watch.finish()
    assert list(watch.outputs) == ["fine"]
    assert watch.outputs["fine"].completions[0].token_ids == tuple(dense_greedy(tiny_model(), PROMPT[:9], 16))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("step_tokens", [4, 64])
def test_the_largest_request_that_fits_gets_through(model: str, step_tokens: int) -> None:
    """Each of several, whole pool and context; one token more is refused at once."""
    engine = make_engine(model, blocks=14, step_tokens=step_tokens)
    most = next(t for t in range(128, 0, -1) if engine.cache.never_fits(t) is None)
    whole = [(PROMPT[: most - 15 - i], GREEDY) for i in range(3) if most - 15 - i > 0]
    assert len({len(p) for p, _ in whole}) >= 1
    for _, output in serve(engine, whole).outputs.items():
        assert output.completions[0].finish_reason == "length"
    with pytest.raises(DoesNotFit):
        engine.add_request("more", [1] * (most - 15 + 1), GREEDY)
    assert held_blocks(engine) == 0


def test_the_context_can_be_used_to_its_last_token() -> None:
    ids = [1 + i % 200 for i in range(100)]
    output = first(make_engine(), replace(GREEDY, max_tokens=28), ids)
    assert output.completions[0].token_ids == tuple(dense_greedy(tiny_model(), ids, 28))


def test_deadlines_end_requests() -> None:
    engine = make_engine()
    engine.add_request("late", PROMPT, GREEDY, deadline_s=-1.0)
    engine.add_request("fine", PROMPT, GREEDY)
    watch = Watch(engine)
    watch.finish()
    assert watch.outputs["late"].completions[0].finish_reason == "error"
    assert "deadline" in (watch.outputs["late"].completions[0].error or "")
    assert watch.outputs["fine"].completions[0].finish_reason == "length"


def test_clock_of_a_request() -> None:
    output = first(make_engine(), GREEDY)
    t = output.timings
    assert t.queue_s >= 0 and t.prefill_s > 0 and t.decode_s > 0 and t.ttft_s == pytest.approx(t.queue_s + t.prefill_s)


def test_windows_hold_at_most_window_and_a_block() -> None:
    engine, window = make_engine("gemma3", step_tokens=7, prefix_caching=False), 6
    (windowed,) = (g for g in engine.cache.groups if g.spec.window_tokens)  # pyright: ignore
    watch, seen = Watch(engine), []
    engine.add_request("0", PROMPT * 3, replace(GREEDY, max_tokens=40))

    def look(_: Any) -> None:
        seen.append(windowed.pools[0].stored_slots)

    watch.finish(look)
    assert max(seen) < window + BLOCK and len(seen) > 40
    assert watch.outputs["0"].completions[0].token_ids == tuple(dense_greedy(tiny_model("gemma3"), PROMPT * 3, 40))


def test_a_read_of_a_free_slot_would_show() -> None:
    """The poison works: a slot that is declared held without being written spoils the answer."""
    engine = make_engine()
    engine.add_request("0", PROMPT[:21], GREEDY)
    Watch(engine).step()
    (group,) = engine.cache.groups  # pyright: ignore[reportAttributeAccessIssue]
    _, blocks = group.tables.entries(0)
    group.pools[0].positions[blocks[-1], -1] = 0  # claims to hold a token that nobody wrote
    hidden = []
    forward = engine.model.forward
    object.__setattr__(engine.model, "forward", lambda *a: hidden.append(forward(*a)) or hidden[-1])
    try:
        engine.step()
    finally:
        object.__delattr__(engine.model, "forward")
    assert torch.isnan(hidden[0]).any()
