"""ollama: the context is the total over its parallel slots, shared in one stream; a window layer keeps the window of
every slot and one batch. It prints one decimal. Source: fs/ggml/ggml.go (GraphSize), server logs'
memory.required.kv."""

from __future__ import annotations

from dataclasses import replace

from kvarn.planner.profiles.base import Figure, Flag, Profile
from kvarn.planner.profiles.llama_cpp import LlamaCppCache
from kvarn.planner.profiles.llama_cpp import resolve as resolve_llama_cpp
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import GIB, KIB, MIB, parse_tokens


def print_size(nbytes: int) -> tuple[str, str, int]:
    """A size as ollama prints it: text with one decimal, unit, bytes of the unit."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f}", name, unit
    return f"{nbytes}", "B", 1


class OllamaCache(LlamaCppCache):
    """llama.cpp's storage in ollama's settings and words."""

    def figures(self, available: int) -> tuple[Figure, ...]:
        held = self.held(self.settings.sequences, self.settings.context_tokens)
        text, unit, worth = print_size(held.k + held.v + held.state)
        return (Figure("required_kv", held.total, unit, text, 0.1 * worth), *super().figures(available))

    def lines(self, available: int) -> tuple[str, ...]:
        f = self.figures(available)[0]
        return (f'memory.required.kv="{f.text} {f.unit}"', *super().lines(available))


def resolve(settings: Settings, dtype: str) -> Settings:
    """Fill in ollama's defaults."""
    return replace(resolve_llama_cpp(settings, dtype), unified=True)


PROFILE = Profile(
    name="ollama",
    flags=(
        Flag(("OLLAMA_CONTEXT_LENGTH", "--num-ctx", "--num_ctx"), "total_context", parse_tokens),
        Flag(("OLLAMA_NUM_PARALLEL", "--num-parallel", "--num_parallel"), "sequences", int),
        Flag(("OLLAMA_KV_CACHE_TYPE", "--kv-cache-type"), "kv_k", str),
        Flag(("--num-batch", "--num_batch"), "batched_tokens", parse_tokens),
    ),
    cache=OllamaCache,
    resolve=resolve,
    budget="all",
    fraction=1.0,
    margin_bytes=457 * MIB,
    runtime_bytes=(200 * MIB, 600 * MIB),
)
