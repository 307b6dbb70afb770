"""Cancelled in every state, beside others in other formats and with other policies: every block comes back, and who
stays gets the tokens that it gets without those who leave."""

from __future__ import annotations

import pytest

from kvarn.core.formats import format_names, parse_kv_format
from kvarn.core.registry import names_in
from kvarn.core.requests import SamplingParams
from kvarn.engine.engine import Engine
from kvarn.kv.choice import parse_choice
from kvarn.kv.manager import CacheManager
from support.engines import Watch, held_blocks, layer_by_layer, make_engine

PROMPT = list(b"It was the miller who turned the stone.")
GREEDY = SamplingParams(max_tokens=56, ignore_eos=True)
TWICE = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=2, ignore_eos=True)
WINDOWS = ("window:8,sinks=2", "window:16")
BY_HEAD = (
    "h2o:50%,recent=4",
    "snapkv:24,query_tokens=8",
    "tova:16,recent=4",
    "scissorhands:50%",
    "adakv:50%,query_tokens=8",
)
BY_KEYS = (
    "knorm:50%,recent=4",
    "keydiff:50%,recent=4",
    "expected_attention:50%,recent=4",
    "pyramidkv:24,query_tokens=4",
)
NARROW = ("fp8_e4m3", "int3", "int2", "turbo4", "turbo2")
BATCHES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "formats": ({"also": ("int8", "int4", "turbo3")}, ("full", "int8", "int4", "turbo3", *WINDOWS)),
    "formats and heads": ({"also": ("int8", "turbo3", *BY_HEAD)}, ("full", "int8", "turbo3", *WINDOWS, *BY_HEAD)),
    "keys and values apart": ({"also": ("k=int8,v=int4",)}, ("full", "k=int8,v=int4", *WINDOWS)),
    "sealed": ({"kv": "int8"}, ("full", *WINDOWS)),
    "sealed late": ({"kv": "int4", "residual_tokens": 6}, ("full", *WINDOWS)),
    "other formats": ({"also": NARROW}, ("full", *NARROW, *WINDOWS)),
    "other policies": ({"also": ("int8", *BY_KEYS)}, ("full", *WINDOWS, "int8", *BY_KEYS)),
    "heads of a sealed cache": ({"kv": "fp8_e4m3", "also": BY_HEAD}, ("full", *BY_HEAD, *WINDOWS)),
    "read again": ({"policy": "kvzip:24,sinks=2", "grain": "head"}, ("kvzip:24,sinks=2", "full", "window:16")),
    "by layer": ({"grain": "layer", "kv": "int8"}, ("full", *WINDOWS)),
    "windows of the model's own": ({"model": "gemma3", "also": ("int8", "int4")}, ("full", "int8", "int4", *WINDOWS)),
    "tiers": ({"policy": "tiered:24"}, ("tiered:24", "window:8", "full")),
}
UNPRESSED = ("sealed", "heads of a sealed cache", "by layer")  # with two places nobody there is preempted
STEPS = (0, 1, 2, 3, 5, 8, 13, 21, 44)


def build(batch: str, max_seqs: int = 12, layered: bool = False) -> Engine:
    """layered: beside rows that decode, prompts go through one layer a step, where their policy allows it."""
    engine = make_engine(**{"block_size": 8, "step_tokens": 24, "max_seqs": max_seqs, **BATCHES[batch][0]})
    return layer_by_layer(engine, tokens=12) if layered else engine


def test_every_format_and_policy_is_swept() -> None:
    """Also one that is a new file."""
    words = " ".join(str(b) for b in BATCHES.values())
    lossless = [name for name in format_names() if parse_kv_format(name).k.lossless]
    assert not [name for name in format_names() if name not in words and name not in lossless]
    assert not [
        name for name in names_in("kvarn.kv.policies") if name not in ("base", "full") and f"{name}:" not in words
    ]


def add(engine: Engine, name: str, choice: str, at: int, priority: int = 0) -> None:
    params = TWICE if at % 3 == 2 else GREEDY
    engine.add_request(name, PROMPT[at % 5 :], params, cache=parse_choice(choice), priority=priority)


def is_back(engine: Engine) -> bool:
    """Nothing is held, every ledger balances, and without the prefix index every slot is empty."""
    assert isinstance(engine.cache, CacheManager)
    engine.cache.check()
    if engine.cache.prefixes is not None:
        engine.cache.prefixes.reset()
    pools = [p for g in engine.cache.groups for p in g.pools]
    empty = all(p.free_blocks == p.n_blocks and p.stored_slots == 0 and (p.positions < 0).all() for p in pools)
    return empty and held_blocks(engine) == 0 and not engine.scheduler.has_work


@pytest.mark.parametrize(("max_seqs", "layered"), [(12, False), (12, True), (2, False)])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_block_comes_back(batch: str, max_seqs: int, layered: bool) -> None:
    """Waiting, in the middle of the prompt, between two layers, decoding, sealed, cut, moved between formats; with two
    places also in the queue and preempted by one that goes first."""
    engine, choices = build(batch, max_seqs, layered), BATCHES[batch][1]
    watch = Watch(engine)
    parts = readings = 0
    for turn, steps in enumerate(STEPS):
        for at, choice in enumerate(choices):
            add(engine, f"{turn} {at}", choice, at)
        for step in range(steps):
            if step == 2:
                add(engine, f"{turn} first", choices[turn % len(choices)], 0, priority=1)
            watch.step()
        engine.cancel(f"{turn} first")
        order = [(turn + at) % len(choices) for at in range(len(choices))]  # each goes first once in a while
        for at in order:
            name = f"{turn} {at}"
            seq_ids = [c.seq_id for c in engine.request(name).completions] if name not in watch.outputs else []
            parts += bool(engine._computing._layered.keys() & set(seq_ids))
            readings += bool(engine._readings.keys() & set(seq_ids))
            engine.cancel(name)
            engine.cache.check()
            assert isinstance(engine.cache, CacheManager) and not engine.cache.sequences.keys() & set(seq_ids)
            if engine.has_work:
                watch.step()
        assert is_back(engine), f"something stays after {steps} steps"
        assert not engine._computing._layered and not engine._readings
    assert not layered or parts, "nobody was cancelled between two layers"
    assert not layered or readings or batch != "read again", "nobody was cancelled while its text was read again"
    assert watch.preemptions or max_seqs > 2 or batch in UNPRESSED, "two of those have all blocks that they want"


@pytest.mark.parametrize("batch", BATCHES)
def test_who_stays_gets_the_same_tokens(batch: str) -> None:
    choices = BATCHES[batch][1]
    for stays, choice in enumerate(choices):
        (alone,) = answers_of(build(batch), [(choice, stays)])
        engine = build(batch)
        watch = Watch(engine)
        for at, other in enumerate(choices):
            add(engine, str(at), other, at)
        for at in range(len(choices)):
            watch.step()
            if at != stays and str(at) not in watch.outputs:
                engine.cancel(str(at))
        watch.finish()
        assert [c.token_ids for c in watch.outputs[str(stays)].completions] == alone
        assert is_back(engine)


def answers_of(engine: Engine, asked: list[tuple[str, int]]) -> list[list[tuple[int, ...]]]:
    watch = Watch(engine)
    for choice, at in asked:
        add(engine, str(at), choice, at)
    watch.finish()
    return [[c.token_ids for c in watch.outputs[str(at)].completions] for _, at in asked]
