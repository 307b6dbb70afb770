"""Kvarn itself, measured as its peers are. Arguments: model, threads, numerics, the cache ('': the default)."""

from __future__ import annotations

import json
import sys

from kvarn.bench.cases import Case
from kvarn.bench.measure import KeptCase, context_for, run_case
from kvarn.core.errors import KvarnError
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
    kept = KeptCase(llm)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = answer_of(llm, kept, Case(**asked["case"]), asked["prompts"])
        except KvarnError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def answer_of(llm: LLM, kept: KeptCase, case: Case, prompts: list[list[int]]) -> dict[str, float]:
    """The case's times. Raises KvarnError."""
    if not case.kept:
        kept.end()
    timing = kept.run(case, prompts) if case.kept else run_case(llm, case, prompts)
    return {"prefill_s": timing.prefill_s, "decode_s": timing.decode_s}


if __name__ == "__main__":
    main(*sys.argv[1:])
