"""What can never be served is refused at once, with the numbers and the cheapest ways out."""

from __future__ import annotations

from kvarn.core.errors import DoesNotFit
from kvarn.core.ledger import CacheLedger
from kvarn.engine.sequence import Entry


def check_fits(entry: Entry, context_tokens: int, cache: CacheLedger) -> None:
    """Raises DoesNotFit where an entry exceeds the context or an empty cache: waiting would not help."""
    prompt = len(entry.prompt_ids)
    if prompt + entry.max_tokens > context_tokens:
        raise DoesNotFit(
            f"{prompt} prompt tokens and {entry.max_tokens} new ones exceed the context of {context_tokens} tokens",
            fixes=_shorter(prompt, entry.max_tokens, context_tokens, "a larger --context"),
        )
    if reason := cache.never_fits(entry.slots_tokens):
        most = _most_tokens(cache, entry.slots_tokens)
        raise DoesNotFit(
            f"{prompt} prompt tokens and {entry.max_tokens} new ones never fit the KV cache: {reason}",
            fixes=_shorter(prompt, entry.max_tokens, most + 1, "a larger --kv-memory, or a smaller --kv format"),
        )


def _most_tokens(cache: CacheLedger, too_many: int) -> int:
    """The most tokens that fit an empty cache; too_many do not."""
    low, high = 0, too_many - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cache.never_fits(middle) is None else (low, middle - 1)
    return low


def _shorter(prompt: int, new: int, limit: int, larger: str) -> tuple[str, ...]:
    """Ways to bring prompt + new to `limit` tokens, cheapest first."""
    fixes = (f"max_tokens of at most {limit - prompt}",) if prompt < limit else ()
    if limit > new:
        fixes += (f"a prompt of at most {limit - new} tokens",)
    return (*fixes, larger)
