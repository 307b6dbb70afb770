"""Windows over a text, each with a part that is read and a part that is scored."""

from __future__ import annotations

from collections.abc import Iterator

from kvarn.core.errors import InvalidRequest
from kvarn.evals.tasks.base import Settings
from kvarn.text import Tokenizer


def windows(tokenizer: Tokenizer, settings: Settings) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, scored): the first window begins the text, each next one is stride_tokens further, so that every token
    is scored once at most. Fewer than asked where the text ends. Raises InvalidRequest."""
    size, stride = settings.context_tokens, settings.stride_tokens
    if not 0 < stride < size:
        raise InvalidRequest(f"a stride of {stride} in windows of {size} tokens", fixes=(f"use 1 to {size - 1}",))
    ids = tokenizer.encode(settings.text)
    starts = range(0, max(1, len(ids) - size + 1), stride)[: settings.windows]
    if len(ids) < size:
        raise InvalidRequest(
            f"the text has {len(ids)} tokens; a window has {size}",
            fixes=(f"--context-tokens {len(ids)}", "a longer --text"),
        )
    for start in starts:
        yield ids[start : start + size - stride], ids[start + size - stride : start + size]
