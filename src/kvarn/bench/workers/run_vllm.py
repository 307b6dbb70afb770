"""vLLM on the CPU over a Hugging Face directory in bfloat16, its engine stepped as Kvarn's is. Arguments: model,
threads, the directory."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams  # pyright: ignore[reportMissingImports]  not in this environment

CONTEXT_TOKENS, STREAMS = 4224, 32
CACHE_GIB = 4  # 32 streams of 2,080 tokens take 2.9 GiB in bfloat16
_names = itertools.count()


def main(_model: str, threads: str, folder: str) -> None:
    """Serve cases until the input ends."""
    cores = sorted(os.sched_getaffinity(0))[: int(threads)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB))
    sys.stdout, answers = sys.stderr, sys.stdout  # vLLM logs to stdout
    args = EngineArgs(
        model=folder,
        dtype="bfloat16",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=STREAMS,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    engine = LLMEngine.from_engine_args(args)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = run(engine, asked["prompts"], asked["case"]["output_tokens"])
        print(json.dumps(answer), file=answers, flush=True)


def run(engine: LLMEngine, prompts: list[list[int]], output_tokens: int) -> dict[str, float]:
    """Greedy answers to all prompts at once, timed step by step."""
    params: Any = SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    begun = time.perf_counter()
    waiting = {f"bench-{next(_names)}" for _ in prompts}
    for name, ids in zip(sorted(waiting), prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    first = begun
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if waiting:
            waiting -= {o.request_id for o in outputs if o.outputs and o.outputs[0].token_ids}
            first = time.perf_counter()
    return {"prefill_s": first - begun, "decode_s": max(time.perf_counter() - first, 1e-9)}


if __name__ == "__main__":
    main(*sys.argv[1:])
