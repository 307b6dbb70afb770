"""OpenVINO GenAI over the GGUF file, on the CPU, by continuous batching (which also serves single requests fastest)."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]  not in Kvarn's environment
import openvino_genai as genai  # pyright: ignore[reportMissingImports]


def main(model: str, threads: str, kv: str = "u8") -> None:
    """Serve cases until the input ends. kv: precision of the cache, u8 or f16."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 4, 512, False
    precision = {"KV_CACHE_PRECISION": kv, "INFERENCE_NUM_THREADS": int(threads)}
    pipe = genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, **precision)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = run(pipe, asked["prompts"], asked["case"]["output_tokens"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def run(pipe: genai.LLMPipeline, prompts: list[list[int]], output_tokens: int) -> dict[str, float | str]:
    """Greedy answers to all prompts together; the last first token's time is the pipeline's own."""
    config = genai.GenerationConfig(max_new_tokens=output_tokens, ignore_eos=True, do_sample=False)
    config.apply_chat_template = False
    ids = np.array(prompts, dtype=np.int64)
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    begun = time.perf_counter()
    metrics = pipe.generate(inputs, config).perf_metrics
    whole = time.perf_counter() - begun
    prefill = max(metrics.raw_metrics.m_times_to_first_token) / 1e6  # in microseconds
    if not 0 < prefill <= whole:
        return {"error": f"first tokens after {prefill} s of {whole} s: the figures do not fit together"}
    return {"prefill_s": prefill, "decode_s": max(whole - prefill, 1e-9)}


if __name__ == "__main__":
    main(*sys.argv[1:])
