"""What a policy's signals cost while decoding: h2o beside the full cache, at equal kept tokens and at equal text.

    scripts/bench signals [--text 4096] [--kept 1024] [--policy h2o] [--steps 96] [--threads N] [--json FILE]

Three engines over the same weights take one step each in turn, so that what else the machine does meets all of them:
the policy with `kept` of `text` tokens, the full cache with `kept` tokens, the full cache with `text` tokens. A step's
time is the mean over whole blocks, the policy's decisions included; the median is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from kvarn.core.options import EngineOptions
from kvarn.core.requests import SamplingParams
from kvarn.engine.build import assemble
from kvarn.engine.engine import Engine
from kvarn.evals.texts import shipped_text
from kvarn.hub import resolve
from kvarn.kernels import load_backend
from kvarn.models.loading import load_model
from kvarn.text import load_tokenizer


class Stream:
    """One engine that decodes one text."""

    def __init__(self, engine: Engine, prompt: Sequence[int], steps: int) -> None:
        self._engine, self.seconds = engine, []
        engine.add_request("measured", prompt, SamplingParams(max_tokens=steps + 2, ignore_eos=True))
        while sum(r.n_tokens for r in engine.step().plan.rows) > 1:
            pass  # the prompt, then one step of decoding that is not counted

    def step(self) -> None:
        self.seconds.append(self._engine.step().duration_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=int, default=4096, help="tokens")
    parser.add_argument("--kept", type=int, default=1024, help="tokens")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    files = resolve("smollm2-135m")
    model, tokenizer, backend = load_model(files, "native"), load_tokenizer(files), load_backend(None)
    ids = tokenizer.encode(shipped_text())

    def stream(kv: str, tokens: int) -> Stream:
        context = tokens + asked.steps + 2
        options = EngineOptions(kv=kv, max_seqs=1, context_tokens=context, prefix_caching=False, threads=asked.threads)
        return Stream(assemble(model, tokenizer, backend, options).engine, ids[:tokens], asked.steps)

    cases = {
        f"{asked.policy}, {asked.kept:,} of {asked.text:,} tokens": stream(f"{asked.policy}:{asked.kept}", asked.text),
        f"full, {asked.kept:,} tokens": stream("full", asked.kept),
        f"full, {asked.text:,} tokens": stream("full", asked.text),
    }
    for _ in range(asked.steps):
        for case in cases.values():
            case.step()
    report = {
        name: {"mean_s": statistics.mean(c.seconds), "median_s": statistics.median(c.seconds)}
        for name, c in cases.items()
    }
    own = next(iter(report.values()))
    print("| cache | step, mean (ms) | median (ms) | policy's speed over this |\n|---|---|---|---|")
    for name, found in report.items():
        ratio = f"{found['mean_s'] / own['mean_s']:.2f}" if found is not own else ""
        print(f"| {name} | {1e3 * found['mean_s']:.2f} | {1e3 * found['median_s']:.2f} | {ratio} |")
    if asked.json is not None:
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
