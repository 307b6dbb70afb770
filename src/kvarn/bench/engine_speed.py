"""Measure how fast Kvarn's engine is on this machine, for the planner: `python -m kvarn.bench.engine_speed`.

Small models of random weights tell a step's costs apart: many tiny layers give the overheads a step and a layer, two
wide layers the rate at which weights are read, the same at a long context the rate for the cache, its prompt the
FLOP/s. Once with weights of 4 bits, once with bfloat16: they run through different products.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import tokenizers
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
from kvarn.planner.hardware import processor_name, read_bandwidth, usable_cores
from kvarn.planner.speed import CHUNK_TOKENS, EngineSpeed, EngineSpeeds, keep_speed
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
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
WIDE |= {"vocab_size": 49152, "num_hidden_layers": 6}
LAYERS = 8, 32  # of the tiny models
OVER_BANDWIDTH = 4.0  # a cache of the processor may read faster than memory, but not without end


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
    """Median seconds of a whole prompt chunk and of a decode step."""

    chunk_s: float
    step_s: float


def make_engine(config: Mapping[str, Any], weights: str) -> tuple[Engine, int]:
    """A Llama of that shape with random weights of that kind, and the bytes of weights that a step reads."""
    full = {"model_type": "llama", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    full |= config
    kind, wanted = load_kind(weights), Wanted()
    load_architecture("llama")(full, wanted)
    model = build_model(full, RandomSource(wanted.shapes()), kind)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(full["vocab_size"])}, "t0"))
    words.decoder = tokenizers.decoders.ByteLevel()
    options = EngineOptions(context_tokens=8192, max_seqs=1, step_tokens=CHUNK_TOKENS, prefix_caching=False)
    return assemble(model, Tokenizer(words, TokenizerSettings()), load_backend(), options).engine, model.weight_bytes


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
    return Timed(statistics.median(chunks), statistics.median(steps))


def measure() -> EngineSpeeds:
    """The constants of this machine; about half a minute when nothing else runs."""
    base_bytes, bandwidth = psutil.Process().memory_info().rss, read_bandwidth(usable_cores())
    return EngineSpeeds(_measured("int4", bandwidth), _measured("bfloat16", bandwidth), base_bytes)


def _measured(weights: str, bandwidth: float) -> EngineSpeed:
    few, many = (timed(make_engine({**TINY, "num_hidden_layers": n}, weights)[0], 8).step_s for n in LAYERS)
    layer_s = max(0.0, (many - few) / (LAYERS[1] - LAYERS[0]))
    step_s = max(0.0, few - LAYERS[0] * layer_s)
    engine, weight_bytes = make_engine(WIDE, weights)
    timed(engine, 8)  # the first products of a shape take longer
    short, long = timed(engine, 8), timed(engine, LONG_TOKENS)
    hidden, ff, layers = WIDE["hidden_size"], WIDE["intermediate_size"], WIDE["num_hidden_layers"]
    kv_width = hidden // WIDE["num_attention_heads"] * WIDE["num_key_value_heads"]
    dense = layers * (2 * hidden * (hidden + kv_width) + 3 * hidden * ff)
    fixed_s = step_s + layers * layer_s
    return EngineSpeed(
        step_s=step_s,
        layer_s=layer_s,
        weight_bytes_per_s=_rate(weight_bytes, short.step_s - fixed_s, bandwidth),
        kv_bytes_per_s=_rate(layers * 2 * kv_width * 2 * LONG_TOKENS, long.step_s - short.step_s, bandwidth),
        prefill_flops=2 * dense * CHUNK_TOKENS / max(1e-6, long.chunk_s - fixed_s),
    )


def _rate(nbytes: float, seconds: float, bandwidth: float) -> float:
    """Bytes a second; a difference of two times that other work has blurred may come out near nothing."""
    return nbytes / max(seconds, nbytes / (OVER_BANDWIDTH * bandwidth))


def main() -> None:
    """Measure and keep."""
    speeds = measure()
    keep_speed(processor_name(), usable_cores(), speeds)
    for words, speed in (("weights of 4 and 8 bits", speeds.codes), ("float weights", speeds.floats)):
        print(f"{words}: step {speed.step_s * 1e3:.2f} ms + {speed.layer_s * 1e6:.0f} us a layer, ", end="")
        print(f"weights at {speed.weight_bytes_per_s / 1e9:.1f} GB/s, ", end="")
        print(f"cache at {speed.kv_bytes_per_s / 1e9:.1f} GB/s, prompts at {speed.prefill_flops / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
