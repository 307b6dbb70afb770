"""Kvarn itself, measured as its peers are. Arguments: model, threads, numerics, the cache ('': the default)."""

from __future__ import annotations

import json
import sys

from kvarn.bench.cases import Case
from kvarn.bench.measure import context_for, run_case
from kvarn.engine.llm import LLM


def main(model: str, threads: str, numerics: str = "invariant", kv: str = "") -> None:
    """Serve cases until the input ends."""
    llm = LLM(
        model,
        threads=int(threads),
        numerics=numerics,
        kv=kv or None,
        max_seqs=32,
        context_tokens=context_for(4096 + 64),
        kv_memory_bytes=3 << 30,
        prefix_caching=False,
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        timing = run_case(llm, Case(**asked["case"]), asked["prompts"])
        print(json.dumps({"prefill_s": timing.prefill_s, "decode_s": timing.decode_s}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
