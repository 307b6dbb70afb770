"""Reading a text again so that a policy learns what repeating it takes: KVzip's context reconstruction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvarn.kv.manager import CacheManager
from kvarn.kv.recompute import RecomputeCache
from kvarn.kv.view import StepInputs
from kvarn.models.base import CausalLM
from kvarn.text import Tokenizer

CHUNK_TOKENS = 512
LEAD_TOKENS = 8
WHOLE = "\n\nRepeat the previous context exactly.\n"
PART = "\n\nRepeat the part of the previous context exactly, starting with"


def read_again_where_due(
    model: CausalLM, cache: CacheManager | RecomputeCache, seq_id: int, tokenizer: Tokenizer
) -> None:
    """Where the sequence's policy asks for it, let the model repeat the text, part by part, and note what it looked at
    (Kim et al. 2025, arXiv 2505.23416, section 3.2). Takes about the time of the text's prefill, and no block."""
    if not isinstance(cache, CacheManager) or not cache.wants_rereading(seq_id):
        return
    text, steps = cache.sequences[seq_id].token_ids, []
    for ids, again in repetitions(text, tokenizer):
        step = cache.begin_rereading(seq_id, len(ids), again)
        reach = torch.full((len(ids),), len(text) + len(ids), dtype=torch.int64)
        with torch.inference_mode():
            model.forward(StepInputs(torch.tensor(ids), step.positions, cache.backend, reach), step)
        steps.append(step)
    cache.note_rereading(seq_id, steps)


def repetitions(text: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[list[int], range]]:
    """For each part of the text: what the model reads, and which of the text's tokens stand at its end. A part after
    the first is announced by the last LEAD_TOKENS before it, as in the paper."""
    whole, part, line = (tokenizer.encode(t, add_special=False) for t in (WHOLE, PART, "\n"))
    for begin in range(0, len(text), CHUNK_TOKENS):
        again = range(begin, min(begin + CHUNK_TOKENS, len(text)))
        said = [*part, *text[max(0, begin - LEAD_TOKENS) : begin], *line] if begin else whole
        yield [*said, *text[begin : again.stop]], again
