"""OpenVINO GenAI over the GGUF file, on the CPU, by continuous batching (which also serves single requests fastest)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]  not in Kvarn's environment
import openvino_genai as genai  # pyright: ignore[reportMissingImports]

CONTEXT_TOKENS = 4224


def main(model: str, threads: str, kv: str = "u8") -> None:
    """Serve cases until the input ends. kv: precision of the cache, u8 or f16."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 4, 512, False
    precision = {"KV_CACHE_PRECISION": kv, "INFERENCE_NUM_THREADS": int(threads)}
    engine = Engine(
        partial(genai.LLMPipeline, model, "CPU", scheduler_config=scheduler, **precision),
        partial(genai.ContinuousBatchingPipeline, model, scheduler, "CPU", precision),
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        run = engine.go_on if asked["case"]["kept"] else engine.run
        try:
            answer = run(asked["case"], asked["prompts"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


class Engine:
    """One pipeline at a time: whole answers, or for a kept case one that is stepped, with its streams."""

    def __init__(self, whole: Callable[[], Any], stepped: Callable[[], Any]) -> None:
        self._make_whole, self._make_stepped = whole, stepped
        self._whole: Any = whole()
        self._stepped: Any = None
        self._handles: list[Any] = []
        self._grown: list[int] = []
        self._case: dict[str, Any] | None = None

    def run(self, case: dict[str, Any], prompts: list[list[int]]) -> dict[str, float | str]:
        """Greedy answers to all prompts together; the last first token's time is the pipeline's own."""
        self._drop()
        self._whole = self._whole or self._make_whole()
        ids = np.array(prompts, dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        begun = time.perf_counter()
        metrics = self._whole.generate(inputs, _greedy(case["output_tokens"])).perf_metrics
        whole = time.perf_counter() - begun
        prefill = max(metrics.raw_metrics.m_times_to_first_token) / 1e6  # in microseconds
        if not 0 < prefill <= whole:
            return {"error": f"first tokens after {prefill} s of {whole} s: the figures do not fit together"}
        return {"prefill_s": prefill, "decode_s": max(whole - prefill, 1e-9)}

    def go_on(self, case: dict[str, Any], prompts: list[list[int]]) -> dict[str, float | str]:
        """output_tokens - 1 steps of the case's streams; prompts are computed only where it is another case than
        before, or where the context is full."""
        steps, most = case["output_tokens"] - 1, CONTEXT_TOKENS - case["prompt_tokens"]
        anew = case != self._case or most - max(self._grown) < steps
        if anew:
            self._drop()
            self._whole, self._stepped = None, self._make_stepped()
        begun = time.perf_counter()
        if anew:
            self._fill(prompts, most)
            self._case = case
        before, first = sum(self._grown), time.perf_counter()
        for _ in range(steps):
            self._stepped.step()
        ended = time.perf_counter()
        self._count()
        if (tokens := sum(self._grown) - before) != steps * len(prompts):
            self._drop()
            return {"error": f"{steps} steps of {len(prompts)} streams brought {tokens} tokens: the cache is too small"}
        return {"prefill_s": first - begun, "decode_s": ended - first}

    def _fill(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Answers to all prompts begin; each of them has its first token."""
        for number, ids in enumerate(prompts):
            tensor = openvino.Tensor(np.array([ids], dtype=np.int64))
            self._handles.append(self._stepped.add_request(number, tensor, _greedy(max_tokens)))
        self._grown = [0] * len(prompts)
        while self._stepped.has_non_finished_requests() and not all(self._grown):
            self._stepped.step()
            self._count()

    def _count(self) -> None:
        """By how many tokens each answer has grown since it was last asked."""
        for number, handle in enumerate(self._handles):
            while handle.can_read():
                self._grown[number] += sum(len(output.generated_ids) for output in handle.read().values())

    def _drop(self) -> None:
        """Free what a kept case holds."""
        self._handles, self._stepped, self._case = [], None, None


def _greedy(tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
    config.apply_chat_template = False
    return config


if __name__ == "__main__":
    main(*sys.argv[1:])
