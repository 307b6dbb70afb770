"""transformers over a Hugging Face directory, on the CPU. Arguments: model, threads, the directory, in which numbers to
compute, which of its attentions."""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main(_model: str, threads: str, folder: str, dtype: str, attention: str) -> None:
    """Serve cases until the input ends."""
    torch.set_num_threads(int(threads))
    how = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    network = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(run(network, asked["prompts"], asked["case"]["output_tokens"])), flush=True)


def run(network: torch.nn.Module, prompts: list[list[int]], output_tokens: int) -> dict[str, float]:
    """Greedy answers by the model's own cache, without the overhead of `generate`."""
    ids = torch.tensor(prompts)
    begun = time.perf_counter()
    with torch.inference_mode():
        out = network(ids, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        first = time.perf_counter()
        for _ in range(output_tokens - 1):
            out = network(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
    return {"prefill_s": first - begun, "decode_s": max(time.perf_counter() - first, 1e-9)}


if __name__ == "__main__":
    main(*sys.argv[1:])
