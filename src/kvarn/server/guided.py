"""Answers that follow a JSON schema, a regular expression, a choice or a grammar, by llguidance's token masks."""

from __future__ import annotations

import json
import re
import threading
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvarn.engine.guide import Guide
from kvarn.server.errors import ApiError, invalid
from kvarn.server.schema.common import ResponseFormat, StructuredOutputs
from kvarn.text import Tokenizer


class _Matcher(Protocol):
    """The part of llguidance.LLMatcher that is used here."""

    def deep_copy(self) -> _Matcher: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def is_stopped(self) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def consume_token(self, sampled_token: int) -> bool: ...


class MatcherGuide(Guide):
    """One answer's place in a grammar."""

    def __init__(self, matcher: _Matcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    @property
    def done(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        return f"constraint: {self._matcher.get_error()}" if self._matcher.is_error() else None

    def fork(self) -> MatcherGuide:
        return MatcherGuide(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> Tensor | None:
        if self._matcher.is_error():
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=min(len(bits) * 8, self._vocab_size), bitorder="little")
        full = np.zeros(self._vocab_size, dtype=bool)
        full[: len(mask)] = mask
        return torch.from_numpy(full)

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class GuideMaker:
    """Compiles constraints. The vocabulary is read at the first one. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._vocabulary: Any = None
        self._lock = threading.Lock()

    def make(self, wanted: ResponseFormat | None, structured: StructuredOutputs | None) -> Guide | None:
        """None where nothing is constrained. May take a second. Raises ApiError 400."""
        try:
            grammar = _grammar(wanted, structured)
        except ValueError as error:  # lone surrogates, too
            raise invalid(f"the constraint is not valid: {error}", code="bad_constraint") from error
        if grammar is None:
            return None
        llguidance = _llguidance()
        matcher = llguidance.LLMatcher(self._words(llguidance), grammar, log_level=0)
        if matcher.is_error():
            raise invalid(f"the constraint does not compile: {matcher.get_error()[:500]}", code="bad_constraint")
        return MatcherGuide(matcher, self._vocab_size)

    def _words(self, llguidance: Any) -> Any:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = llguidance.LLTokenizer(
                    self._tokenizer.to_json(),
                    n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                    eos_token=sorted(self._tokenizer.end_ids) or None,
                )
            return self._vocabulary


def _llguidance() -> Any:
    try:
        import llguidance  # noqa: PLC0415  (optional)
    except ImportError as error:
        raise ApiError(
            400, "constrained answers need llguidance", code="unsupported", fixes=("pip install 'kvarn[serve]'",)
        ) from error
    return llguidance


def _grammar(wanted: ResponseFormat | None, structured: StructuredOutputs | None) -> str | None:
    """The one constraint of a request, in llguidance's form."""
    found = [g for g in (_from_format(wanted), _from_structured(structured)) if g is not None]
    if len(found) > 1:
        raise invalid("response_format and structured_outputs both constrain the answer; use one")
    return found[0] if found else None


def _from_format(wanted: ResponseFormat | None) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _schema({"type": "object"})
    if wanted.type == "regex":
        if wanted.regex is None:
            raise invalid("response_format.regex is missing", param="response_format")
        return _regex(wanted.regex)
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise invalid("response_format.json_schema.schema is missing", param="response_format")
    return _schema(wanted.json_schema.schema_)


def _from_structured(structured: StructuredOutputs | None) -> str | None:
    if structured is None:
        return None
    given = [
        (structured.json_schema, _schema),
        (structured.regex, _regex),
        (structured.choice, lambda texts: _regex("|".join(re.escape(t) for t in texts))),
        (structured.grammar, lambda text: _llguidance().LLMatcher.grammar_from_lark(text)),
    ]
    chosen = [make(value) for value, make in given if value is not None]
    if len(chosen) != 1:
        raise invalid(
            f"structured_outputs names {len(chosen)} constraints; give exactly one", param="structured_outputs"
        )
    return chosen[0]


def _schema(schema: dict[str, Any]) -> str:
    return _llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _regex(pattern: str) -> str:
    return _llguidance().LLMatcher.grammar_from_regex(pattern)
