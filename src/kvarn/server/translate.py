"""From a body of the API to the engine's words: prompts to token ids, fields to SamplingParams."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.core.requests import SamplingParams
from kvarn.server.bridge import Work
from kvarn.server.context import ServerContext
from kvarn.server.errors import ApiError, invalid
from kvarn.server.kv_choice import chosen_cache
from kvarn.server.schema.chat import ChatBody, ChatMessage
from kvarn.server.schema.common import Shared
from kvarn.server.schema.completions import CompletionBody
from kvarn.server.tenants import Tenant
from kvarn.text import Tokenizer

SHORT_CHARS = 4_096  # longer texts are encoded off the event loop
MAX_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Asked:
    """What the engine is to do for one API request. max_tokens None: what the context leaves."""

    body: Shared
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None = None


async def completion_asked(context: ServerContext, body: CompletionBody) -> Asked:
    """Raises ApiError."""
    if body.suffix is not None:
        raise invalid("suffix is not supported; send null", param="suffix", code="unsupported")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of differs from n; ask for n and choose", param="best_of", code="unsupported")
    if body.echo and body.stream and body.logprobs is not None:
        raise invalid("echo with logprobs is not streamed; send stream: false", param="echo", code="unsupported")
    prompts = [await _encode(context.tokenizer, p) for p in _prompts(body.prompt)]
    scored = body.logprobs if body.echo else None
    wanted = 16 if body.max_tokens is None else max(1, body.max_tokens)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens is 0; use 1 or more, or echo", param="max_tokens")
    return Asked(body, tuple(prompts), wanted, body.logprobs, scored)


def _prompts(prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | Sequence[int]]:
    """One prompt or many? A list of integers is one."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]  # pyright: ignore[reportReturnType]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"{len(prompt)} prompts in one request; at most {MAX_PROMPTS}", param="prompt")
    return list(prompt)  # pyright: ignore[reportReturnType]


async def _encode(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return tuple(prompt)
    if not prompt:
        raise invalid("the prompt is empty", param="prompt")
    if len(prompt) <= SHORT_CHARS:
        return tuple(tokenizer.encode(prompt))
    return tuple(await asyncio.to_thread(tokenizer.encode, prompt))


async def chat_asked(context: ServerContext, body: ChatBody) -> Asked:
    """Raises ApiError, InvalidRequest."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", param="top_logprobs")
    ids = await chat_ids(context.tokenizer, body.messages)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Asked(body, (ids,), body.max_completion_tokens or body.max_tokens, logprobs)


async def chat_ids(tokenizer: Tokenizer, messages: Sequence[ChatMessage], generation: bool = True) -> tuple[int, ...]:
    """Token ids of a conversation."""
    plain = [_plain(m) for m in messages]

    def encode() -> list[int]:
        return tokenizer.encode_chat(plain, add_generation_prompt=generation)

    if sum(len(m["content"]) for m in plain) <= SHORT_CHARS:
        return tuple(encode())
    return tuple(await asyncio.to_thread(encode))


def _plain(message: ChatMessage) -> dict[str, Any]:
    """What chat templates know: role and content as one text. `developer` is OpenAI's newer word for `system`."""
    content = message.content
    text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    plain = {"role": "system" if message.role == "developer" else message.role, "content": text}
    return {**plain, "name": message.name} if message.name else plain


async def works(context: ServerContext, tenant: Tenant, asked: Asked, request_id: str) -> list[Work]:
    """One Work a prompt. Raises ApiError, InvalidRequest."""
    body = asked.body
    context.check_model(body.model)
    cache = chosen_cache(body.kv, context.plan)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream: true", param="stream_options")
    guide = None
    if body.response_format is not None or body.structured_outputs is not None:
        guide = await asyncio.to_thread(context.guides.make, body.response_format, body.structured_outputs)
    timeouts = [t for t in (body.timeout_s, context.settings.request_timeout_s) if t is not None]
    return [
        Work(
            request_id=f"{request_id}-{index}",
            prompt_ids=ids,
            params=_params(context, asked, ids),
            priority=tenant.priority + (body.priority or 0),
            tenant=tenant.name,
            namespace=_namespace(tenant, body.cache_salt),
            deadline_s=min(timeouts, default=None),
            guide=guide,
            cache=cache,
        )
        for index, ids in enumerate(asked.prompts)
    ]


def _namespace(tenant: Tenant, salt: str | None) -> bytes:
    if salt is None:
        return tenant.namespace
    return hashlib.sha256(tenant.namespace + b"\0salt\0" + salt.encode("utf-8", "surrogatepass")).digest()


def _params(context: ServerContext, asked: Asked, ids: Sequence[int]) -> SamplingParams:
    body = asked.body
    left = context.most_tokens - len(ids)
    if left < 1:
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens; with at least one more it must fit in {context.most_tokens}",
            code="context_length_exceeded",
            param="prompt",
            fixes=(f"a prompt of at most {context.most_tokens - 1} tokens", "a larger --context or --kv-memory"),
        )
    return SamplingParams(
        max_tokens=left if asked.max_tokens is None else asked.max_tokens,
        temperature=_or(body.temperature, 1.0),
        top_k=_or(body.top_k, 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_bias(body.logit_bias, context.vocab_size),
        seed=body.seed,
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        n=_or(body.n, 1),
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        ignore_eos=bool(body.ignore_eos),
    )


def _or(value: Any, default: Any) -> Any:
    """OpenAI's clients send null for 'your default'."""
    return default if value is None else value


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _bias(asked: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Keys are token ids in quotes."""
    found: dict[int, float] = {}
    for key, bias in (asked or {}).items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= vocab_size:
            raise invalid(f"logit_bias names token {key[:40]!r}; ids are 0 to {vocab_size - 1}", param="logit_bias")
        if abs(bias) > 100:
            raise invalid(f"logit_bias of token {key} is {bias}; use -100 to 100", param="logit_bias")
        found[int(key)] = bias
    return found


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
