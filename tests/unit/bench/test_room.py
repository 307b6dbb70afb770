"""Whether the caches of a kept case fit into memory at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvarn.bench import room
from kvarn.bench.cases import Case
from kvarn.bench.peers import Engine, kvarn
from kvarn.bench.room import GROWN_WHILE_FILLING, PROCESS_BYTES, fit_together, needed_bytes
from support.models import CONFIGS, write_model_directory

CASE = Case("kept", 4, 100, 11, "decode", kept=True)
TOKENS = CASE.streams * (CASE.prompt_tokens + GROWN_WHILE_FILLING + 3 * CASE.output_tokens)
PEER = Engine("peer", "peer", ())


def caches(*engines: Engine) -> int:
    """Bytes that are not the processes' own."""
    counted = sum(e.keeps for e in engines) + (not all(e.keeps for e in engines))
    return needed_bytes(CASE, engines, 1000, 0, 3) - counted * PROCESS_BYTES


def test_every_engine_that_keeps_its_cache_counts_by_its_numbers() -> None:
    assert caches(PEER) == TOKENS * 1000
    assert caches(PEER, replace(PEER, name="wide", cache_bits=32)) == 3 * TOKENS * 1000
    assert caches(replace(PEER, reserved_bytes=1 << 40)) == 1 << 40
    assert kvarn("float32").cache_bits == 32 and kvarn().cache_bits == 16


def test_of_those_that_keep_nothing_the_largest_counts() -> None:
    passing = replace(PEER, name="passing", keeps=False)
    assert caches(PEER, passing, replace(passing, name="other")) == 2 * TOKENS * 1000


def test_free_memory_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_model_directory(tmp_path, "llama")
    config = CONFIGS["llama"]
    head = config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
    needed = needed_bytes(CASE, [PEER], token_bytes, directory.stat().st_size, 3)
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(room, "free_memory_bytes", lambda _, free=free: free)
        assert fit_together(directory, 3, CASE, [PEER]) is fits
