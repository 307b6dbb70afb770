"""Text out of token ids as they come: whole characters only, and never a piece of a stop string.

By construction the pieces joined equal the whole text: there is one path from ids to text, and `decode` walks it too.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence


class TextStream:
    """One answer's text.

    token_bytes: id -> bytes. skip: ids that give no text (special tokens). stops: non-empty strings; the text ends
    before the stop string that is complete first (of several ending at the same character, the longest).
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], skip: Iterable[int] = (), stops: Sequence[str] = ()
    ) -> None:
        self._token_bytes, self._skip, self._stops = token_bytes, frozenset(skip), tuple(stops)
        # Undecodable bytes become U+FFFD, but bytes that may still become a character are waited for.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain after these ids too; '' once a stop string was met."""
        if self.stopped_by is not None:
            return ""
        raw = b"".join(self._token_bytes(i) for i in token_ids if i not in self._skip)
        self._held += self._decoder.decode(raw)
        return self._release()

    def finish(self) -> str:
        """The text held back in case it became a stop string. A character that never became whole is left out."""
        rest, self._held = self._held, ""
        return rest

    def _release(self) -> str:
        if found := self._first_stop():
            start, self.stopped_by = found
            text, self._held = self._held[:start], ""
            return text
        keep = self._possible_prefix()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def _first_stop(self) -> tuple[int, str] | None:
        """Where the stop string that ends first starts, and which it is."""
        starts = ((self._held.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(ends)[1:] if ends else None

    def _possible_prefix(self) -> int:
        """Length of the longest end of the held text with which a stop string may begin."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


def text_of(token_bytes: Callable[[int], bytes], token_ids: Iterable[int], skip: Iterable[int] = ()) -> str:
    """The text of all ids at once, without stop strings."""
    stream = TextStream(token_bytes, skip)
    return stream.push(token_ids) + stream.finish()
