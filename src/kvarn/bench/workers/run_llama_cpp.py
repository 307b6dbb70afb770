"""llama.cpp through its own llama-batched-bench, one run a case. Arguments: folder of its programs, model, threads,
type of the KV cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def main(folder: str, model: str, threads: str, kv: str = "f16") -> None:
    """Serve cases until the input ends."""
    program = Path(folder) / "llama-batched-bench"
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(program, model, threads, kv, json.loads(line)["case"])), flush=True)


def run(program: Path, model: str, threads: str, kv: str, case: dict[str, Any]) -> dict[str, Any]:
    """Its figures of prompt and generation time for that many prompts, token ids of its choice. Where decoding alone
    counts, one prompt is computed and its cache copied to every stream."""
    streams, prompt, output = case["streams"], case["prompt_tokens"], case["output_tokens"]
    sizes = ["-npp", prompt, "-ntg", output, "-npl", streams, "-c", streams * (prompt + output) + 64]
    how = ["-b", 2048, "-ub", 512, "-t", threads, "-tb", threads, "-ctk", kv, "-ctv", kv, "--output-format", "jsonl"]
    flash = ["-fa", "on"] if kv != "f16" else []
    # One prompt for all: without -kvu, llama_kv_cache::seq_cp copies its cells into each sequence's own buffer.
    shared = ["-pps"] if case["counted"] == "decode" and streams > 1 else []
    command = [str(a) for a in (program, "-m", model, *sizes, *how, *flash, *shared)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"LD_LIBRARY_PATH": str(program.parent)}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": f"llama-batched-bench ended with {done.returncode}: {done.stderr[-300:]}"}
    got = json.loads(lines[-1])
    return {"prefill_s": got["t_pp"], "decode_s": got["t_tg"] * max(1, output - 1) / output}


if __name__ == "__main__":
    main(*sys.argv[1:])
