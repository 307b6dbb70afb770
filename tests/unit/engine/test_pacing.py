"""What a long prompt may cost those that decode, learned from the durations of a made-up machine."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field, replace

import pytest

from kvarn.engine.pacing import LOOK_EVERY_STEPS, Pace
from kvarn.engine.prices import LEAST_TOKENS, Chunk, ChunkPrices
from kvarn.engine.step_plan import Layers, Row

PROMPT = 4_000


def rows(decodes: int, chunk: tuple[int, int] | None = None) -> list[Row]:
    """Decoding rows, and a chunk of so many tokens behind so many others."""
    prompt = [Row(99, chunk[1], chunk[0], False)] if chunk else []
    return [Row(i, 100, 1, True) for i in range(decodes)] + prompt


@dataclass
class Machine:
    """Seconds: of a decoding step, of a chunk for being there, of a token, of reading 1,000 tokens before a chunk, of a
    token's attention over 1,000 others. noise: relative spread. hiccups: share of steps taking three times as long."""

    decode_s: float
    fixed_s: float = 0.0
    token_s: float = 0.0
    behind_s: float = 0.0
    both_s: float = 0.0
    noise: float = 0.0
    hiccups: float = 0.0
    source: random.Random = field(default_factory=lambda: random.Random(0))

    def step(self, tokens: int = 0, start: int = 0) -> float:
        took_s = self.decode_s
        if tokens:
            took_s += self.fixed_s + self.behind_s * start / 1000 + tokens * (self.token_s + self.both_s * start / 1000)
        hiccup = 3.0 if self.source.random() < self.hiccups else 1.0
        return took_s * hiccup * self.source.lognormvariate(0.0, self.noise)


SMALL = Machine(0.006, 0.0005, 0.0007, 0.001, 0.0004)  # about the default model on two cores, one stream
MIDDLE = Machine(0.012, 0.0005, 0.0006, 0.001, 0.0004)  # 8 streams
LARGE = Machine(0.060, 0.002, 0.0007, 0.001, 0.0004)  # 32 streams


def warmed(machine: Machine, decodes: int, most_slowdown: float = 2.2) -> Pace:
    """After the streams' own prompts and some steps of decoding."""
    pace = Pace(most_slowdown)
    for _ in range(decodes):
        pace.note([Row(0, 0, 64, True)], machine.step(64))
    for _ in range(20):
        pace.note(rows(decodes), machine.step())
    return pace


def prefill(pace: Pace, machine: Machine, decodes: int, prompt: int = PROMPT) -> list[tuple[int, float]]:
    """(tokens, seconds) of each step until the prompt is computed."""
    found, start = list[tuple[int, float]](), 0
    while start < prompt:
        tokens = min(pace.allowance(decodes).tokens(start), prompt - start)
        took_s = machine.step(tokens, start)
        pace.note(rows(decodes, (tokens, start) if tokens else None), took_s)
        found.append((tokens, took_s))
        start += tokens
    return found


def prefill_by_layers(pace: Pace, machine: Machine, decodes: int, layers: int = 30) -> list[tuple[int, float]]:
    """As `prefill`, in chunks that go through some of the layers a step."""
    found, start = list[tuple[int, float]](), 0
    while start < PROMPT:
        n = min(pace.allowance(decodes).layered_tokens(start, layers), PROMPT - start)
        if not n:  # decoding alone is to be looked at
            found += prefill(pace, machine, decodes, prompt=LEAST_TOKENS)
            assert len(found) < PROMPT
            continue
        done = 0
        while done < layers:
            end = min(layers, done + pace.allowance(decodes).layers(start, n, layers))
            part = Layers(done, end, layers)
            took_s = machine.decode_s + (machine.step(n, start) - machine.decode_s) * (end - done) / layers
            pace.note([*rows(decodes), Row(99, start, n, False, (), part)] if end > done else rows(decodes), took_s)
            found.append((n, took_s))
            done = end
        start += n
    return found


def p99(found: list[tuple[int, float]]) -> float:
    return sorted(s for _, s in found)[int(0.99 * len(found))]


@pytest.mark.parametrize("noise", [0.0, 0.08])
@pytest.mark.parametrize(("machine", "decodes"), [(SMALL, 1), (LARGE, 32), (Machine(0.02, 0.0, 0.0001), 8)])
def test_from_the_first_chunk_to_the_last_steps_keep_to_the_slowdown(machine: Machine, decodes: int, noise: float):
    machine = replace(machine, noise=noise, source=random.Random(1))
    found = prefill(warmed(machine, decodes), machine, decodes)
    assert p99(found) <= 3 * machine.decode_s
    assert found[0][1] <= 3 * machine.decode_s, "the first chunk is no worse"
    later = [s for n, s in found[len(found) // 2 :] if n]
    assert statistics.median(later) >= 1.8 * machine.decode_s, "what may be had is used"


@pytest.mark.parametrize("noise", [0.0, 0.08])
@pytest.mark.parametrize(("machine", "decodes"), [(SMALL, 1), (MIDDLE, 8)])
def test_by_layers_a_prompt_is_faster_and_steps_keep_to_the_slowdown(machine: Machine, decodes: int, noise: float):
    machine = replace(machine, noise=noise, source=random.Random(1))
    layered, whole = (each(warmed(machine, decodes), machine, decodes) for each in (prefill_by_layers, prefill))
    assert p99(layered) <= 3 * machine.decode_s
    assert sum(s for _, s in layered) <= 0.8 * sum(s for _, s in whole)


def test_a_second_prompt_is_priced_right_at_once():
    pace = warmed(SMALL, 1)
    first, second = prefill(pace, SMALL, 1), prefill(pace, SMALL, 1)
    assert max(s for _, s in second) <= 3 * SMALL.decode_s
    assert len(second) <= 1.1 * len(first)


def test_a_busy_machine_does_not_press_the_pace_to_the_least():
    busy = replace(SMALL, noise=0.4, hiccups=0.05, source=random.Random(2))
    quiet = len(prefill(warmed(SMALL, 1), SMALL, 1))
    assert len(prefill(warmed(busy, 1), busy, 1)) <= 1.6 * quiet


def test_a_prompt_always_comes_on():
    dear = Machine(0.001, 0.1, 0.1)
    found = prefill(warmed(dear, 1), dear, 1, prompt=400)
    assert {n for n, _ in found} == {0, LEAST_TOKENS}
    assert sum(n == 0 for n, _ in found) <= 1 + len(found) // LOOK_EVERY_STEPS


def test_decoding_is_looked_at_before_the_first_chunk_and_now_and_then():
    pace = Pace(2.2)
    assert pace.allowance(1).tokens(0) == 0, "how long a step takes alone is not known yet"
    pace.note(rows(1), 0.006)
    assert pace.allowance(1).tokens(0) == LEAST_TOKENS, "nor what a token costs"
    found = prefill(pace, SMALL, 1)
    assert [i for i, (n, _) in enumerate(found) if n == 0][:2] == [LOOK_EVERY_STEPS, 2 * LOOK_EVERY_STEPS + 1]


def test_short_prompts_in_every_step_do_not_hold_a_long_one_up():
    pace, given = Pace(2.2), 0
    for _ in range(20):
        tokens = pace.allowance(4).tokens(0)
        given += tokens
        pace.note([*rows(4), Row(50, 0, 20, True), *([Row(99, 0, tokens, False)] if tokens else [])], 0.03)
    assert given >= 15 * LEAST_TOKENS


def test_a_machine_that_became_slower_is_noticed_without_a_pause_in_the_prompts():
    pace = warmed(SMALL, 1)
    slow = Machine(*(3 * t for t in (0.006, 0.0005, 0.0007, 0.001, 0.0004)))  # pyright: ignore[reportArgumentType]
    found = prefill(pace, slow, 1, prompt=1_000) + prefill(pace, slow, 1, prompt=1_000)
    again = prefill(pace, slow, 1, prompt=1_000)
    wanted = prefill(warmed(slow, 1), slow, 1, prompt=1_000)
    assert len(found) > len(wanted) and len(again) <= 1.25 * len(wanted)


def test_one_long_pause_changes_little():
    pace = warmed(SMALL, 8)
    before = pace.allowance(8).tokens(0)
    pace.note(rows(8), 0.5)
    pace.note(rows(8, (before, 0)), 0.5)
    assert 0.5 * before <= pace.allowance(8).tokens(0) <= 1.1 * before


def test_other_numbers_of_rows_are_told_from_the_nearest():
    pace = Pace(2.0)
    pace.note(rows(8), 0.008)
    pace.note(rows(8, (10, 0)), 0.018)
    known = pace.allowance(8).tokens(0)
    assert known == pytest.approx(8, abs=2)
    assert (pace.allowance(64).tokens(0), pace.allowance(2).tokens(0)) == (known, LEAST_TOKENS)


def test_what_one_prompt_spends_the_next_lacks():
    pace = warmed(LARGE, 32)
    allowance = pace.allowance(32)
    whole = allowance.tokens(0)
    allowance.spend(0, whole // 2)
    assert allowance.tokens(0) == pytest.approx(whole - whole // 2, abs=3)
    allowance.spend(0, whole)
    assert allowance.tokens(0) == 0


def test_prices_are_found_where_chunks_differ():
    source, prices = random.Random(3), ChunkPrices()
    for _ in range(3_000):
        n, start = source.randint(1, 40), source.randint(0, 4_000)
        prices.learn([Chunk(n, start)], SMALL.step(n, start) - SMALL.decode_s)
    for n, start in ((4, 0), (4, 4_000), (30, 0), (30, 2_000)):
        assert prices.cost_s(n, start) == pytest.approx(SMALL.step(n, start) - SMALL.decode_s, rel=0.1)
        assert prices.fitting_tokens(start, prices.cost_s(n, start) * 1.001) == n
