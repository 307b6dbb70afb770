"""Reading a text again so that a policy learns what repeating it takes: KVzip's context reconstruction."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvarn.kv.manager import CacheManager
from kvarn.kv.recompute import RecomputeCache
from kvarn.kv.rereading import Rereading
from kvarn.kv.view import StepInputs
from kvarn.models.base import CausalLM
from kvarn.text import Tokenizer

CHUNK_TOKENS = 512
LEAD_TOKENS = 8
WHOLE = "\n\nRepeat the previous context exactly.\n"
PART = "\n\nRepeat the part of the previous context exactly, starting with"


class Reading:
    """The text of a sequence that the model repeats, part by part, and some layers at a time (Kim et al. 2025, arXiv
    2505.23416, section 3.2). Takes about the time of the text's prefill, and no block. Parts do not see each other, and
    the cache must stay as it is meanwhile, so it does not matter how the reading is divided: same bits."""

    def __init__(self, model: CausalLM, cache: CacheManager, seq_id: int, tokenizer: Tokenizer) -> None:
        self._model, self._cache, self._seq_id = model, cache, seq_id
        self._text = cache.sequences[seq_id].token_ids
        self._parts = deque(repetitions(self._text, tokenizer))
        self._read: list[Rereading] = []
        self._part: tuple[StepInputs, Rereading] | None = None
        self._x: Tensor | None = None
        self._done_layers = 0

    @property
    def part_tokens(self) -> list[int]:
        """Tokens of each part that is left."""
        return [len(ids) for ids, _ in self._parts]

    def go_on(self, to_layer: int | None = None) -> bool:
        """Take the next part through the layers before to_layer; None: to its end. True once the whole text was read:
        then the cache has noted what was looked at."""
        if self._part is None:
            self._part = self._begin(*self._parts[0])
        inputs, step = self._part
        end = len(self._model.layers) if to_layer is None else to_layer
        with torch.inference_mode():
            self._x = self._model.forward_layers(self._x, inputs, step, range(self._done_layers, end))
        self._done_layers = end
        return end == len(self._model.layers) and self._end(step)

    def _begin(self, ids: list[int], again: range) -> tuple[StepInputs, Rereading]:
        step = self._cache.begin_rereading(self._seq_id, len(ids), again)
        reach = torch.full((len(ids),), len(self._text) + len(ids), dtype=torch.int64)
        return StepInputs(torch.tensor(ids), step.positions, self._cache.backend, reach), step

    def _end(self, step: Rereading) -> bool:
        """The part was read."""
        step.own.clear()  # its keys and values are of no use to the others
        self._read.append(step)
        self._part, self._x, self._done_layers = None, None, 0
        self._parts.popleft()
        if not self._parts:
            self._cache.note_rereading(self._seq_id, self._read)
        return not self._parts


def read_again_where_due(
    model: CausalLM, cache: CacheManager | RecomputeCache, seq_id: int, tokenizer: Tokenizer
) -> None:
    """Where the sequence's policy asks for it, let the model repeat the text in one go."""
    if isinstance(cache, CacheManager) and cache.wants_rereading(seq_id):
        reading = Reading(model, cache, seq_id, tokenizer)
        while not reading.go_on():
            pass


def repetitions(text: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[list[int], range]]:
    """For each part of the text: what the model reads, and which of the text's tokens stand at its end. A part after
    the first is announced by the last LEAD_TOKENS before it, as in the paper."""
    whole, part, line = (tokenizer.encode(t, add_special=False) for t in (WHOLE, PART, "\n"))
    for begin in range(0, len(text), CHUNK_TOKENS):
        again = range(begin, min(begin + CHUNK_TOKENS, len(text)))
        said = [*part, *text[max(0, begin - LEAD_TOKENS) : begin], *line] if begin else whole
        yield [*said, *text[begin : again.stop]], again
