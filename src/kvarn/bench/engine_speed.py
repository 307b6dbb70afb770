"""Measure how fast Kvarn's engine is on this machine, for the planner: `python -m kvarn.bench.engine_speed`.

Small models of random weights tell a step's costs apart: many tiny layers give the overheads a step and a layer, two
wide layers the rate at which weights are read, the same at a long context the rate for the cache, its prompt the
FLOP/s.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import tokenizers
import torch
from torch import Tensor

from kvarn.core.options import EngineOptions
from kvarn.core.requests import SamplingParams
from kvarn.engine.build import assemble
from kvarn.engine.engine import Engine
from kvarn.kernels import load_backend
from kvarn.models.base import load_architecture
from kvarn.models.build import Wanted
from kvarn.models.loading.load import build_model, load_kind
from kvarn.models.weights.base import RawBlocks
from kvarn.planner.hardware import processor_name, usable_cores
from kvarn.planner.speed import CHUNK_TOKENS, EngineSpeed, keep_speed
from kvarn.text.tokenizer import Tokenizer, TokenizerSettings

STEPS = 24
LONG_TOKENS = 3072
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
}
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
WIDE |= {"vocab_size": 49152, "num_hidden_layers": 6}


class RandomSource:
    """Normal numbers for every tensor that an architecture asks for."""

    provenance, norms_include_one = "random numbers", False

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, out: Tensor) -> None:
        out.normal_(0.0, 0.02)

    def raw(self, name: str) -> RawBlocks | None:
        return None


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of the fastest whole prompt chunk and of the fastest decode step."""

    chunk_s: float
    step_s: float


def make_engine(config: Mapping[str, Any]) -> Engine:
    """A Llama of that shape with random weights, in the engine's own weight kind."""
    full = {"model_type": "llama", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    full |= config
    kind, wanted = load_kind("native"), Wanted()
    load_architecture("llama")(full, wanted)
    model = build_model(full, RandomSource(wanted.shapes()), kind)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(full["vocab_size"])}, "t0"))
    words.decoder = tokenizers.decoders.ByteLevel()
    options = EngineOptions(context_tokens=8192, max_seqs=1, step_tokens=CHUNK_TOKENS, prefix_caching=False)
    return assemble(model, Tokenizer(words, TokenizerSettings()), load_backend(), options).engine


def timed(engine: Engine, prompt_tokens: int) -> Timed:
    """One greedy request: its prompt in chunks, then some decode steps."""
    ids = [i % 200 for i in range(prompt_tokens)]
    engine.add_request(
        f"p{prompt_tokens}-{time.perf_counter_ns()}", ids, SamplingParams(max_tokens=STEPS, ignore_eos=True)
    )
    chunks, steps = [], []
    for i in itertools.count():
        if not engine.has_work:
            break
        begun = time.perf_counter()
        engine.step()
        (chunks if i < -(-prompt_tokens // CHUNK_TOKENS) else steps).append(time.perf_counter() - begun)
    return Timed(min(chunks), min(steps))


def measure() -> EngineSpeed:
    """The constants of this machine; about ten seconds when nothing else runs."""
    base_bytes = psutil.Process().memory_info().rss
    deep, flat = (timed(make_engine({**TINY, "num_hidden_layers": n}), 8) for n in (32, 8))
    layer_s = max(0.0, (deep.step_s - flat.step_s) / 24)
    step_s = max(0.0, flat.step_s - 8 * layer_s)
    wide = make_engine(WIDE)
    short, long = timed(wide, 8), timed(wide, LONG_TOKENS)
    hidden, ff, layers = WIDE["hidden_size"], WIDE["intermediate_size"], WIDE["num_hidden_layers"]
    dense = layers * (4 * hidden * hidden + 3 * hidden * ff)
    read_bytes = 2 * (dense + WIDE["vocab_size"] * hidden)
    cache_bytes = layers * 2 * hidden * 2 * LONG_TOKENS
    fixed_s = step_s + layers * layer_s
    return EngineSpeed(
        step_s=step_s,
        layer_s=layer_s,
        weight_bytes_per_s=read_bytes / max(1e-6, short.step_s - fixed_s),
        kv_bytes_per_s=cache_bytes / max(1e-6, long.step_s - short.step_s),
        prefill_flops=2 * dense * CHUNK_TOKENS / max(1e-6, long.chunk_s - fixed_s),
        base_bytes=base_bytes,
    )


def main() -> None:
    """Measure and keep."""
    speed = measure()
    keep_speed(processor_name(), usable_cores(), speed)
    print(f"step {speed.step_s * 1e3:.2f} ms + {speed.layer_s * 1e6:.0f} us a layer, weights at ", end="")
    print(f"{speed.weight_bytes_per_s / 1e9:.1f} GB/s, cache at {speed.kv_bytes_per_s / 1e9:.1f} GB/s, ", end="")
    print(f"prompts at {speed.prefill_flops / 1e9:.0f} GFLOP/s (torch {torch.__version__})")


if __name__ == "__main__":
    main()
