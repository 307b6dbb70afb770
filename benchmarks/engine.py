"""Decoding by Kvarn, one stream and sixteen, beside transformers in bfloat16 on one stream: interleaved rounds in one
process, medians and ratios. Needs the development tools (transformers reads the GGUF's numbers as bfloat16).

    scripts/bench engine [--rounds 5] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvarn import LLM
from kvarn.hub import resolve

PROMPT_TOKENS, OUTPUT_TOKENS, STREAMS = 32, 96, 16


def prompt(index: int) -> list[int]:
    """Token ids without meaning; how long a step takes does not hang on them."""
    return [100 + (7 * i + index) % 5000 for i in range(PROMPT_TOKENS)]


def kvarn_rate(llm: LLM, streams: int) -> float:
    """Tokens a second, of all streams together, from the first token to the last."""
    outputs = llm.generate([prompt(i) for i in range(streams)], max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    return streams * (OUTPUT_TOKENS - 1) / max(o.timings.decode_s for o in outputs)


def transformers_rate(network: Any) -> float:
    """Greedy decoding with the model's own cache, without the overhead of `generate`."""
    with torch.inference_mode():
        out = network(torch.tensor([prompt(0)]), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        begun = time.perf_counter()
        for _ in range(OUTPUT_TOKENS - 1):
            out = network(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
    return (OUTPUT_TOKENS - 1) / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    files = resolve("smollm2-135m")
    llm = LLM(files, kv_memory_bytes=1 << 29, prefix_caching=False, max_seqs=STREAMS)
    folder, name = files.weights[0].parent, files.weights[0].name
    network = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=name, dtype=torch.bfloat16).eval()
    cases: dict[str, Callable[[], float]] = {
        "kvarn, 1 stream": lambda: kvarn_rate(llm, 1),
        f"kvarn, {STREAMS} streams": lambda: kvarn_rate(llm, STREAMS),
        "transformers bfloat16, 1 stream": lambda: transformers_rate(network),
    }
    runs: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(asked.rounds):
        for case, run in cases.items():
            runs[case].append(run())
    medians = {case: statistics.median(values) for case, values in runs.items()}
    base = medians["transformers bfloat16, 1 stream"]
    for case, median in medians.items():
        spread = f"{min(runs[case]):.1f} to {max(runs[case]):.1f}"
        print(f"{case:34}{median:8.1f} tokens/s  ({spread})  {median / base:5.2f}x transformers' one stream")
    if asked.json:
        asked.json.write_text(json.dumps({"threads": asked.threads, "runs": runs, "medians": medians}, indent=1))


if __name__ == "__main__":
    main()
