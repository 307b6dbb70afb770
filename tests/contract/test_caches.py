"""Every cache mode must give the same answers, whatever the chunks, the batch, the order, the room."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch

from kvarn.core.options import CACHE_MODES
from kvarn.core.requests import SamplingParams
from kvarn.kernels import backend_report
from support.dense import dense_greedy, dense_logits
from support.engines import BLOCK, Watch, answers, block_bytes, held_blocks, make_engine, serve
from support.models import CONFIGS, tiny_model

MODELS = tuple(CONFIGS)
TEXT = list(b"The mill turns, the water falls, and grain by grain the day goes by.")
LENGTHS = (BLOCK - 1, BLOCK, BLOCK + 1, 1, 2, 30, 68, *(5 + i for i in range(10)))
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.3, top_p=0.95, seed=7, repetition_penalty=1.2)


def prompts() -> list[list[int]]:
    """17 prompts of different lengths and beginnings."""
    return [list(itertools.islice(itertools.cycle(TEXT[i:] + TEXT[:i]), n)) for i, n in enumerate(LENGTHS)]


def many() -> list[tuple[list[int], SamplingParams]]:
    """17 requests, greedy and sampled."""
    return [(ids, SAMPLED if i % 2 else GREEDY) for i, ids in enumerate(prompts())]


@cache
def alone(model: str, index: int) -> list[tuple[int, ...]]:
    """What one of the many gets from an engine of its own, whole prefill."""
    return answers(make_engine(model, step_tokens=512), [many()[index]])[0]


@pytest.mark.parametrize("model", MODELS)
def test_answers_say_something(model: str) -> None:
    """The tests below mean something only if the tokens hang on the prompt."""
    found = [dense_greedy(tiny_model(model), ids, 8) for ids in prompts()]
    assert len({tuple(f) for f in found}) == len(found)
    assert len({t for f in found for t in f}) > 40


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", CACHE_MODES)
def test_greedy_equals_the_textbook(mode: str, model: str) -> None:
    ids = TEXT[:29]
    (found,) = answers(make_engine(model, cache=mode), [(ids, GREEDY)])
    assert list(found[0]) == dense_greedy(tiny_model(model), ids, GREEDY.max_tokens)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", CACHE_MODES)
def test_alone_equals_in_a_batch_of_17(mode: str, model: str) -> None:
    together = answers(make_engine(model, cache=mode), many())
    assert together == [alone(model, i) for i in range(len(together))]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", ["paged", "contiguous"])
@pytest.mark.parametrize("step_tokens", [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 512])
def test_any_chunking_gives_the_same(step_tokens: int, mode: str, model: str) -> None:
    asked = many()[4:8]
    engine = make_engine(model, cache=mode, step_tokens=step_tokens)
    watch = serve(engine, asked)
    assert max(sum(r.n_tokens for r in s.plan.rows) for s in watch.steps) <= step_tokens
    found = [[c.token_ids for c in watch.outputs[str(i)].completions] for i in range(4)]
    assert found == [alone(model, i) for i in range(4, 8)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("step_tokens", [1, 3, BLOCK, 512])
def test_hidden_states_equal_the_textbook(step_tokens: int, model: str) -> None:
    """Prompt log-probabilities, whole vocabulary's best, against a direct computation."""
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=5, logprobs=5, ignore_eos=True)
    output = serve(make_engine(model, step_tokens=step_tokens), [(TEXT, wanted)]).outputs["0"]
    exact = torch.log_softmax(dense_logits(tiny_model(model), TEXT).double(), dim=-1)
    found = [*(output.prompt_logprobs or ())[1:], (output.completions[0].logprobs or ())[0]]
    targets = [*TEXT[1:], output.completions[0].token_ids[0]]
    assert len(found) == len(TEXT)
    for line, target, got in zip(exact, targets, found, strict=True):
        assert got is not None and got.token_id == target
        assert got.logprob == pytest.approx(float(line[target]), abs=1e-4)
        best = torch.topk(line, 5)
        assert [p for _, p in got.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_requests_that_come_and_go_do_not_see_each_other(model: str) -> None:
    """One joins every second step; each ends when it is done."""
    engine = make_engine(model, step_tokens=16, max_seqs=5)
    watch, coming = Watch(engine), list(enumerate(many()))
    while coming or engine.has_work:
        if len(watch.steps) % 2 == 0 and coming:
            index, one = coming.pop(0)
            engine.add_request(str(index), *one)
        watch.step()
    watch.check_streams()
    for index in range(17):
        assert [c.token_ids for c in watch.outputs[str(index)].completions] == alone(model, index)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("blocks", [22, 31])
def test_preemption_changes_no_token(blocks: int, model: str) -> None:
    """The pool holds one long request, or a few short ones, of five that want to run at once."""
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    spec = [
        replace(long, temperature=1.3, top_p=0.95, seed=7, repetition_penalty=1.2),
        long,
        replace(long, temperature=0.9, seed=3, frequency_penalty=0.7, top_k=20),
        replace(long, presence_penalty=1.5, logprobs=3, prompt_logprobs=2),
        replace(long, temperature=0.8, seed=5, n=3),
    ]
    asked = list(zip([p for p in prompts() if len(p) < 20][:5], spec, strict=True))
    roomy = serve(make_engine(model), asked)
    engine = make_engine(model, blocks=blocks)
    tight = serve(engine, asked)
    assert tight.preemptions > 0 and roomy.preemptions == 0
    for request_id, output in roomy.outputs.items():
        again = tight.outputs[request_id]
        assert [c.token_ids for c in again.completions] == [c.token_ids for c in output.completions]
        assert [c.text for c in again.completions] == [c.text for c in output.completions]
        for a, b in zip(again.prompt_logprobs or (), output.prompt_logprobs or (), strict=True):
            assert (a is None) == (b is None) and (a is None or a.logprob == pytest.approx(b.logprob, abs=1e-4))


def test_preemption_with_stop_strings() -> None:
    prompt, long = TEXT[:18], replace(SAMPLED, max_tokens=50)
    plain = serve(make_engine(), [(prompt, long)]).outputs["0"].completions[0]
    tokenizer = make_engine().tokenizer
    text = tokenizer.decode(plain.token_ids, continuing=True)
    stop = text[40:43]
    expected = text[: text.index(stop)]
    others = [(ids, replace(GREEDY, max_tokens=60)) for ids in prompts()[:4]]
    tight = serve(make_engine(blocks=20), [*others, (prompt, replace(long, stop=(stop,)))])
    assert any(p.seq_id == 4 for s in tight.steps for p in s.plan.preempted)
    found = tight.outputs["4"].completions[0]
    assert (found.text, found.finish_reason) == (expected, "stop")


def test_recompute_holds_nothing_and_contiguous_reserves_everything() -> None:
    asked = [(ids, GREEDY) for ids in prompts()[:3]]
    none, contiguous = make_engine(cache="none"), make_engine(cache="contiguous", max_seqs=4)
    assert none.cache.memory().pool_bytes == 0
    serve(none, asked)
    assert none.cache.peak.physical_bytes == 0 and none.cache.scratch_bytes_peak > 0
    serve(contiguous, asked)
    context = contiguous.cache.plan.context_tokens // BLOCK
    assert contiguous.cache.peak.blocks == 3 * context
    assert contiguous.cache.peak.physical_bytes == 3 * context * block_bytes(tiny_model())
    assert held_blocks(contiguous) == 0
    paged = make_engine()
    serve(paged, asked)
    assert paged.cache.peak.utilisation > 0.8 > contiguous.cache.peak.utilisation


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", CACHE_MODES)
def test_further_completions_give_the_same_in_every_mode(mode: str, model: str) -> None:
    params = SamplingParams(max_tokens=16, n=4, temperature=1.0, seed=11, ignore_eos=True)
    asked = [(TEXT[:22], params), (TEXT[:9], GREEDY)]
    assert answers(make_engine(model, cache=mode), asked) == answers(make_engine(model), asked)


@pytest.mark.parametrize("model", MODELS)
def test_contiguous_serves_more_requests_than_reservations(model: str) -> None:
    asked = [(ids, GREEDY) for ids in prompts()[:6]]
    engine = make_engine(model, cache="contiguous", max_seqs=2)
    assert answers(engine, asked) == answers(make_engine(model), asked)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("blocks", [None, 40, 24])
def test_a_prefix_hit_changes_no_token(blocks: int | None, model: str) -> None:
    """The same requests again, and their beginnings, while the index keeps what it can."""
    engine = make_engine(model, blocks=blocks)
    asked = many()[4:12]
    expected = [alone(model, i) for i in range(4, 12)]
    assert answers(engine, asked) == expected
    again = Watch(engine)
    for index, one in enumerate(asked):
        engine.add_request(f"again {index}", *one)
    again.finish()
    found = [again.outputs[f"again {i}"] for i in range(8)]
    assert [[c.token_ids for c in o.completions] for o in found] == expected
    assert blocks is not None or all(o.cached_tokens >= (len(o.prompt_ids) - 1) // BLOCK * BLOCK for o in found)
    assert held_blocks(engine) == 0


@pytest.mark.parametrize("model", MODELS)
def test_prefix_caching_off_keeps_nothing(model: str) -> None:
    engine = make_engine(model, prefix_caching=False)
    assert answers(engine, many()[4:8]) == [alone(model, i) for i in range(4, 8)]
    assert engine.cache.memory().blocks == 0


@pytest.mark.parametrize("grain", ["group", "layer", "head"])
@pytest.mark.parametrize("model", MODELS)
def test_the_grain_of_tables_changes_no_token(model: str, grain: str) -> None:
    assert answers(make_engine(model, grain=grain), many()[4:9]) == [alone(model, i) for i in range(4, 9)]


@pytest.mark.parametrize("backend", [r.name for r in backend_report() if r.available])
@pytest.mark.parametrize("model", MODELS)
def test_every_backend_equals_the_textbook(model: str, backend: str) -> None:
    asked = many()[4:8:2]
    expected = [dense_greedy(tiny_model(model), ids, GREEDY.max_tokens) for ids, _ in asked]
    found = answers(make_engine(model, backend=backend, step_tokens=7), asked)
    assert [list(one[0]) for one in found] == expected
