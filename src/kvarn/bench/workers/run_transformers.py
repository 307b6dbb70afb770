"""transformers over a Hugging Face directory, on the CPU. Arguments: model, threads, the directory, in which numbers to
compute, which of its attentions."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

CONTEXT_TOKENS = 4224


def main(_model: str, threads: str, folder: str, dtype: str, attention: str) -> None:
    """Serve cases until the input ends."""
    torch.set_num_threads(int(threads))
    how = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    engine = Engine(AutoModelForCausalLM.from_pretrained(folder, **how).eval())
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        run = engine.go_on if asked["case"]["kept"] else engine.run
        with torch.inference_mode():
            answer = run(asked["case"], asked["prompts"])
        print(json.dumps(answer), flush=True)


class Engine:
    """Greedy answers by the model's own cache, without the overhead of `generate`; the cache of the kept case that was
    measured last."""

    def __init__(self, network: torch.nn.Module) -> None:
        self._network = network
        self._case: dict[str, Any] | None = None
        self._cache: Any = None
        self._token = torch.empty(0)

    def run(self, case: dict[str, Any], prompts: list[list[int]]) -> dict[str, float]:
        """All prompts at once, then one token of each a step."""
        self._case = self._cache = None
        begun = time.perf_counter()
        self._step(torch.tensor(prompts))
        first = time.perf_counter()
        for _ in range(case["output_tokens"] - 1):
            self._step(self._token)
        ended = time.perf_counter()
        self._cache = None
        return {"prefill_s": first - begun, "decode_s": max(ended - first, 1e-9)}

    def go_on(self, case: dict[str, Any], prompts: list[list[int]]) -> dict[str, float]:
        """output_tokens - 1 steps of the case's streams; prompts are computed only where it is another case than
        before, or where the context is full."""
        steps = case["output_tokens"] - 1
        begun = time.perf_counter()
        if case != self._case or self._cache.get_seq_length() + steps > CONTEXT_TOKENS:
            self._fill(prompts)
            self._case = case
        first = time.perf_counter()
        for _ in range(steps):
            self._step(self._token)
        return {"prefill_s": first - begun, "decode_s": time.perf_counter() - first}

    def _fill(self, prompts: list[list[int]]) -> None:
        """The streams' caches, computed one after the other, which takes less memory than all at once."""
        caches, tokens = [], []
        for ids in prompts:
            self._cache = None
            self._step(torch.tensor([ids]))
            caches.append(self._cache)
            tokens.append(self._token)
        self._cache, self._token = caches[0], torch.cat(tokens)
        for number, joined in enumerate(self._cache.layers):
            layers = [cache.layers[number] for cache in caches]
            joined.keys = torch.cat([layer.keys for layer in layers])
            joined.values = torch.cat([layer.values for layer in layers])
            for cache in caches[1:]:
                cache.layers[number] = None  # its memory is free

    def _step(self, ids: torch.Tensor) -> None:
        out = self._network(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache, self._token = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
