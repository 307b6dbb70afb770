"""What is timed, the same for every engine: prompts of token ids and answers of a fixed length."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Counted = Literal["decode", "prefill", "all"]


@dataclass(frozen=True, slots=True)
class Case:
    """`streams` requests at once, each of `prompt_tokens` and `output_tokens`. counted: whose tokens a second: those of
    the answers after the first ones, those of the prompts until the first tokens, or all over the whole time. kept: the
    prompts are computed in the first round only; each later one goes on decoding the same streams where the last one
    stopped, so that the context grows by output_tokens - 1 a round."""

    name: str
    streams: int
    prompt_tokens: int
    output_tokens: int
    counted: Counted
    kept: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


CASES = (
    Case("decode", 1, 32, 128, "decode"),
    Case("decode_at_4096", 1, 4096, 48, "decode"),
    Case("prefill_512", 1, 512, 1, "prefill"),
    Case("batch_32x128+64", 32, 128, 64, "all"),
    Case("decode_32_at_2048", 32, 2048, 32, "decode", kept=True),
)


@dataclass(frozen=True, slots=True)
class Timing:
    """prefill_s: until every request had its first token. decode_s: from there to the last token."""

    prefill_s: float
    decode_s: float


def tokens_per_s(case: Case, timing: Timing) -> float:
    """The case's figure."""
    if case.counted == "prefill":
        return case.streams * case.prompt_tokens / timing.prefill_s
    if case.counted == "decode":
        return case.streams * (case.output_tokens - 1) / timing.decode_s
    return case.streams * (case.prompt_tokens + case.output_tokens) / (timing.prefill_s + timing.decode_s)


def prompt_ids(case: Case, vocabulary: int = 32_000) -> list[list[int]]:
    """One prompt a stream; no two begin alike, so no engine can reuse a prefix."""
    return [
        [(7 * position + 1009 * stream + 11 * stream * position) % (vocabulary - 300) + 300
         for position in range(case.prompt_tokens)]
        for stream in range(case.streams)
    ]  # fmt: skip
