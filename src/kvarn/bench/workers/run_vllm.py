"""vLLM on the CPU over a Hugging Face directory in bfloat16, its engine stepped as Kvarn's is. Arguments: model,
threads, the directory, GiB of its cache."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams  # pyright: ignore[reportMissingImports]  not in this environment

CONTEXT_TOKENS, STREAMS = 4224, 32
_names = itertools.count()


def main(_model: str, threads: str, folder: str, cache_gib: str) -> None:
    """Serve cases until the input ends."""
    cores = sorted(os.sched_getaffinity(0))[: int(threads)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", cache_gib)
    # In a process of its own the engine would go on decoding a kept case's streams while others are measured.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.stdout, answers = sys.stderr, sys.stdout  # vLLM logs to stdout
    args = EngineArgs(
        model=folder,
        dtype="bfloat16",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=STREAMS,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    engine = Engine(LLMEngine.from_engine_args(args))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        run = engine.go_on if asked["case"]["kept"] else engine.run
        print(json.dumps(run(asked["case"], asked["prompts"])), file=answers, flush=True)


class Engine:
    """vLLM's engine, and the streams of the kept case that was measured last."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._grown: dict[str, int] = {}
        self._case: dict[str, Any] | None = None

    def run(self, case: dict[str, Any], prompts: list[list[int]]) -> dict[str, float]:
        """Greedy answers to all prompts at once, timed step by step."""
        self._end()
        begun = time.perf_counter()
        self._fill(prompts, case["output_tokens"])
        first = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"prefill_s": first - begun, "decode_s": max(time.perf_counter() - first, 1e-9)}

    def go_on(self, case: dict[str, Any], prompts: list[list[int]]) -> dict[str, float | str]:
        """output_tokens - 1 tokens of each of the case's streams; prompts are computed only where it is another case
        than before, or where the context is full."""
        more, most = case["output_tokens"] - 1, CONTEXT_TOKENS - case["prompt_tokens"]
        begun = time.perf_counter()
        if case != self._case or most - max(self._grown.values()) < more:
            self._end()
            self._fill(prompts, most)
            self._case = case
        first, goals = time.perf_counter(), {name: grown + more for name, grown in self._grown.items()}
        while self._engine.has_unfinished_requests() and any(self._grown[name] < goals[name] for name in goals):
            self._step()
        ended = time.perf_counter()
        if self._grown != goals:
            self._end()
            return {"error": "not all streams grew alike: the cache is too small"}
        return {"prefill_s": first - begun, "decode_s": ended - first}

    def _fill(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Answers to all prompts begin; each of them has its first token."""
        params: Any = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        self._grown = {f"bench-{next(_names)}": 0 for _ in prompts}
        for name, ids in zip(sorted(self._grown), prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": ids}, params)
        while self._engine.has_unfinished_requests() and not all(self._grown.values()):
            self._step()

    def _step(self) -> None:
        for output in self._engine.step():
            self._grown[output.request_id] = len(output.outputs[0].token_ids)

    def _end(self) -> None:
        """Their memory is free."""
        self._engine.abort_request(list(self._grown))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._grown, self._case = {}, None


if __name__ == "__main__":
    main(*sys.argv[1:])
