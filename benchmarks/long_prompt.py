"""What a long prompt costs those that decode: steps without it, then every step until it is computed, in one run.

    scripts/bench long_prompt [--model smollm2-135m] [--prompt 4000] [--streams 1 8] [--steps 200] [--threads N]
                              [--json FILE]

The streams decode greedily from 64 tokens each; after `steps` steps the long prompt comes, and when it is done `steps`
more are taken (the streams are longer then). A step's time is what those that decode wait for their next token,
everything between two steps included. Memory is made present ahead, as the server does. The goal: the 99th percentile
beside the prompt is at most three times the median without it. The same ratio of the steps alone stands beside it: what
that is above 1 is other work on the machine, and has its part in the prompt's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvarn.core.files import ModelFiles
from kvarn.core.options import EngineOptions
from kvarn.core.requests import SamplingParams
from kvarn.engine.build import build_engine
from kvarn.engine.engine import Engine
from kvarn.evals.texts import shipped_text
from kvarn.hub import resolve
from kvarn.kv.ahead import BlocksAhead
from kvarn.kv.manager import CacheManager

OWN_TOKENS = 64  # of each stream's own prompt
MOST_STEPS = 5_000


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds of steps before the prompt, beside it and after it, and how many of its tokens those beside it took."""

    streams: int
    before_s: list[float]
    after_s: list[float]
    beside_s: list[float]
    tokens: list[int]

    def row(self) -> str:
        alone_s = self.before_s + self.after_s
        median, before, after = (statistics.median(each) for each in (alone_s, self.before_s, self.after_s))
        p99 = percentile(self.beside_s, 0.99)
        cells = (
            str(self.streams),
            f"{1e3 * median:.2f} ({1e3 * before:.2f}, {1e3 * after:.2f})",
            f"{tail(self.before_s):.2f}, {tail(self.after_s):.2f}",
            str(len(self.beside_s)),
            f"{1e3 * statistics.median(self.beside_s):.2f}",
            f"{1e3 * p99:.2f}",
            f"{p99 / median:.2f}",
            f"{sum(self.beside_s):.2f}",
            f"{sum(self.tokens) / len(self.tokens):.1f}",
        )
        return "| " + " | ".join(cells) + " |"


HEAD = (
    "| streams | alone, median (before, after; ms) | alone, p99 / median | steps beside | beside, median | beside, p99 "
    "| p99 / median alone | prompt (s) | its tokens a step |\n|---|---|---|---|---|---|---|---|---|"
)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least so large a share does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(1e6 * share * len(ordered)) // 1_000_000) - 1))]


def tail(values: Sequence[float]) -> float:
    """What the machine itself does to single steps: their 99th percentile over their median."""
    return percentile(values, 0.99) / statistics.median(values)


class Clocked:
    """Steps of an engine with the time from the end of one to the end of the next."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.cache, CacheManager)
        self.engine, self.ahead, self._last = engine, BlocksAhead(engine.cache.groups), time.perf_counter()

    def step(self) -> tuple[float, dict[str, int]]:
        """Seconds, and the tokens that each living sequence got, by sequence id."""
        result = self.engine.step()
        self.ahead.after_step()
        now = time.perf_counter()
        took_s, self._last = now - self._last, now
        return took_s, {str(r.seq_id): r.new_tokens for r in result.plan.rows}


def measure(files: ModelFiles, streams: int, prompt: int, steps: int, threads: int) -> Found:
    options = EngineOptions(max_seqs=streams + 1, context_tokens=prompt + 3 * steps + OWN_TOKENS, threads=threads)
    parts = build_engine(files, options)
    engine, ids = parts.engine, parts.tokenizer.encode(shipped_text())
    clocked = Clocked(engine)
    while clocked.ahead.fill():
        pass
    for index in range(streams):
        begin = prompt + OWN_TOKENS * index
        params = SamplingParams(max_tokens=prompt + 2 * steps, ignore_eos=True)
        engine.add_request(f"stream {index}", ids[begin : begin + OWN_TOKENS], params)
    while len(rows := clocked.step()[1]) < streams or max(rows.values()) > 1:
        pass
    before_s = [clocked.step()[0] for _ in range(steps)]
    state = engine.add_request("long", ids[:prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    seq_id, beside_s, tokens = str(state.completions[0].seq_id), list[float](), list[int]()
    while not state.done and len(beside_s) < MOST_STEPS:
        took_s, rows = clocked.step()
        beside_s.append(took_s)
        tokens.append(rows.get(seq_id, 0))
    after_s = [clocked.step()[0] for _ in range(steps)]
    return Found(streams, before_s, after_s, beside_s, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=4_000, help="tokens")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=200, help="without the prompt")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    files = resolve(asked.model)
    print(HEAD)
    found = []
    for streams in asked.streams:
        found.append(measure(files, streams, asked.prompt, asked.steps, asked.threads))
        print(found[-1].row(), flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(f) for f in found]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
