"""Whether what the engines hold of a kept case fits into this machine's memory at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from kvarn.bench.cases import Case
from kvarn.bench.peers import Engine
from kvarn.core.formats import parse_kv_format
from kvarn.kv.sizing import bytes_per_token
from kvarn.planner.hardware import free_memory_bytes
from kvarn.planner.sources import load_geometry

BLOCK_TOKENS = 64
GROWN_WHILE_FILLING = 256  # tokens by which the first stream is ahead when the last prompt is computed, at most
PROCESS_BYTES = 768 << 20  # libraries and what a step needs
WEIGHTS_TO_FILE = 4  # most engines hold 4-bit weights in a wider form


def fit_together(model: Path, repeats: int, case: Case, engines: Sequence[Engine]) -> bool:
    """By what is free now. Of engines that keep nothing between rounds only the largest counts, as they take turns."""
    token_bytes = bytes_per_token(load_geometry(str(model)).layers, parse_kv_format("bfloat16"), BLOCK_TOKENS)
    needed = needed_bytes(case, engines, token_bytes, model.stat().st_size, repeats)
    return needed <= free_memory_bytes(psutil.virtual_memory().available)


def needed_bytes(case: Case, engines: Sequence[Engine], token_bytes: int, file_bytes: int, repeats: int) -> int:
    """An estimate from above. token_bytes: of the cache in 16 bits. file_bytes: of the model's file."""
    tokens = case.streams * (case.prompt_tokens + GROWN_WHILE_FILLING + repeats * case.output_tokens)
    process = PROCESS_BYTES + WEIGHTS_TO_FILE * file_bytes
    held = {e.name: max(e.reserved_bytes, tokens * token_bytes * e.cache_bits // 16) + process for e in engines}
    passing = [held[e.name] for e in engines if not e.keeps]
    return sum(held[e.name] for e in engines if e.keeps) + max(passing, default=0)
