"""From the engine's words back to OpenAI's: choices, usage, log-probabilities; whole, or as chunks of a stream."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from kvarn.core.cache_params import CacheParams
from kvarn.core.requests import Completion, Delta, RequestOutput, TokenLogprob
from kvarn.server import kv_choice
from kvarn.server.bridge import Finished, Work
from kvarn.server.context import ServerContext
from kvarn.server.errors import from_ended
from kvarn.server.schema.common import Shared
from kvarn.text import Tokenizer

LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have


class Form(Protocol):
    """How one of the two endpoints writes its answers."""

    def choice(self, index: int, completion: Completion, output: RequestOutput) -> dict[str, Any]: ...

    def opening(self, index: int) -> dict[str, Any] | None: ...

    def piece(self, index: int, delta: Delta) -> dict[str, Any]: ...

    def envelope(self, streamed: bool) -> dict[str, Any]: ...


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    return usage(
        sum(len(o.prompt_ids) for o in outputs),
        sum(len(c.token_ids) for o in outputs for c in o.completions),
        sum(o.cached_tokens for o in outputs),
    )


def raise_if_failed(results: Iterable[Finished]) -> None:
    """Raises ApiError where the engine ended an answer before its end."""
    for result in results:
        for completion in result.output.completions:
            if completion.finish_reason not in ("stop", "length"):
                raise from_ended(result.ended, completion.error)


def whole(
    context: ServerContext, body: Shared, form: Form, cache: CacheParams | None, results: Sequence[Finished]
) -> dict[str, Any]:
    """The body of an answer that is not streamed. cache: what the request chose."""
    outputs = [r.output for r in results]
    n = body.n or 1
    choices = [form.choice(i * n + c.index, c, o) for i, o in enumerate(outputs) for c in o.completions]
    answer = {**form.envelope(streamed=False), "choices": choices, "usage": usage_of(outputs)}
    if body.kvarn or body.kv is not None:
        answer["kvarn"] = kv_choice.report(context.plan, context.kv_got(cache), outputs)
    return answer


class ChunkWriter:
    """Chunks of one streamed API request; index of a choice: prompt x n + completion."""

    def __init__(self, context: ServerContext, body: Shared, form: Form, works: Sequence[Work]) -> None:
        prompts = {w.request_id: (i, len(w.prompt_ids)) for i, w in enumerate(works)}
        self._cache = works[0].cache
        self._context, self._body, self._form, self._prompts = context, body, form, prompts
        options = body.stream_options
        self._want_usage = bool(options and options.include_usage)
        self._every_usage = bool(options and options.continuous_usage_stats)
        self._n = body.n or 1
        self._tokens = 0

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._prompts) * self._n):
            if (choice := self._form.opening(index)) is not None:
                yield self._chunk([choice])

    def piece(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Nothing for a token whose text is held back."""
        self._tokens += len(delta.token_ids)
        silent = not delta.text and delta.finish_reason is None and not delta.logprobs
        if not silent or self._body.return_token_ids:
            index = self._prompts[delta.request_id][0] * self._n + delta.index
            yield self._chunk([self._form.piece(index, delta)])

    def closing(self, results: Sequence[Finished]) -> Iterator[dict[str, Any]]:
        """The usage, where it was asked for, and what the cache did."""
        outputs = [r.output for r in results]
        report = None
        if self._body.kvarn or self._body.kv is not None:
            report = kv_choice.report(self._context.plan, self._context.kv_got(self._cache), outputs)
        if self._want_usage or report is not None:
            chunk = {**self._form.envelope(streamed=True), "choices": [], "usage": usage_of(outputs)}
            yield chunk if report is None else {**chunk, "kvarn": report}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._form.envelope(streamed=True), "choices": choices}
        if self._every_usage:
            chunk["usage"] = usage(sum(n for _, n in self._prompts.values()), self._tokens, 0)
        elif self._want_usage:
            chunk["usage"] = None
        return chunk


class _Base:
    """What both forms need. skipped: end tokens, which have no text and no log-probability in an answer."""

    kinds = ("", "")

    def __init__(self, answer_id: str, model: str, tokenizer: Tokenizer, body: Shared) -> None:
        self._id, self._model, self._tokenizer, self._body = answer_id, model, tokenizer, body
        self._created = int(time.time())
        self._skipped = frozenset() if body.ignore_eos else tokenizer.end_ids

    def envelope(self, streamed: bool) -> dict[str, Any]:
        return {"id": self._id, "object": self.kinds[streamed], "created": self._created, "model": self._model}

    def _shown(self, logprobs: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        return [p for p in logprobs if p.token_id not in self._skipped]

    def _token(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self._body.return_token_ids else {}


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob) if not math.isnan(logprob) else LEAST_LOGPROB


class ChatForm(_Base):
    kinds = ("chat.completion", "chat.completion.chunk")

    def choice(self, index: int, completion: Completion, output: RequestOutput) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": completion.finish_reason,
            **self._ids(completion.token_ids),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.logprobs) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
            **self._ids(delta.token_ids),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = [
            {**self._entry(p.token_id, p.logprob), "top_logprobs": [self._entry(*top) for top in p.top]}
            for p in self._shown(logprobs)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionForm(_Base):
    kinds = ("text_completion", "text_completion")

    def __init__(
        self, answer_id: str, model: str, tokenizer: Tokenizer, body: Shared, echoes: Sequence[str], empty: bool
    ) -> None:
        """echoes: each prompt's text where it is to come first. empty: the prompt alone was wanted."""
        super().__init__(answer_id, model, tokenizer, body)
        self._echoes, self._empty = echoes, empty
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, completion: Completion, output: RequestOutput) -> dict[str, Any]:
        echo = self._echo(index)
        logprobs = None
        if completion.logprobs is not None:
            prompt = self._prompt_logprobs(output) if echo else []
            own = [] if self._empty else self._shown(completion.logprobs)
            logprobs = self._logprobs([*prompt, *own], 0)
        return {
            "index": index,
            "text": echo + ("" if self._empty else completion.text),
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            **self._ids(completion.token_ids),
        }

    def _echo(self, index: int) -> str:
        return self._echoes[index // (self._body.n or 1)] if self._echoes else ""

    def _prompt_logprobs(self, output: RequestOutput) -> list[TokenLogprob | int]:
        """The first token has none; it stands as its id."""
        scored = output.prompt_logprobs or ()
        return [i if p is None else p for i, p in zip(output.prompt_ids, scored, strict=False)]

    def opening(self, index: int) -> dict[str, Any] | None:
        echo = self._echo(index)
        return {"index": index, "text": echo, "logprobs": None, "finish_reason": None} if echo else None

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        start = self._offsets.get(index, 0)
        self._offsets[index] = start + len(delta.text)
        shown = self._shown(delta.logprobs)
        return {
            "index": index,
            "text": "" if self._empty else delta.text,
            "logprobs": self._logprobs(shown, start) if shown else None,
            "finish_reason": delta.finish_reason,
            **self._ids(delta.token_ids),
        }

    def _logprobs(self, entries: Sequence[TokenLogprob | int], start: int) -> dict[str, Any]:
        ids = [e if isinstance(e, int) else e.token_id for e in entries]
        tokens = [self._token(i) for i in ids]
        offsets, at = [], start
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if isinstance(e, int) else _finite(e.logprob) for e in entries],
            "top_logprobs": [None if isinstance(e, int) else self._top(e) for e in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens; of two that look the same the likelier one. The chosen one is always among them."""
        top = {self._token(t): _finite(p) for t, p in reversed(entry.top)}
        return {**top, self._token(entry.token_id): _finite(entry.logprob)}
