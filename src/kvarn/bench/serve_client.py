"""One streamed request to an OpenAI-compatible server, with the time of every piece."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvarn.core.errors import InvalidRequest

DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Target:
    """A server. api: 'chat' or 'completions'. ignore_eos: ask for answers of exactly the wished length. command: starts
    it for the time of its measurement; None: it runs."""

    name: str
    url: str
    model: str
    api: str = "chat"
    api_key: str | None = None
    ignore_eos: bool = True
    command: str | None = None


@dataclass(slots=True)
class Record:
    """What became of one request; times in seconds from its sending. pieces_s: when each piece of text came."""

    conversation: int
    turn: int
    sent_s: float
    pieces_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None for a single one."""
        span_s = self.pieces_s[-1] - self.pieces_s[0]
        return span_s / (self.output_tokens - 1) if self.output_tokens > 1 else None


async def find_model(http: httpx.AsyncClient, url: str, headers: dict[str, str]) -> str:
    """The first model that the server names. Raises InvalidRequest where it does not answer."""
    try:
        response = await http.get(f"{url}/v1/models", headers=headers)
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise InvalidRequest(
            f"{url} does not answer /v1/models: {error or type(error).__name__}", fixes=("start a server there",)
        ) from error


def headers_of(target: Target) -> dict[str, str]:
    return {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}


def body_of(target: Target, messages: list[dict[str, str]], output_tokens: int) -> dict[str, Any]:
    common = {
        "model": target.model,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        common["ignore_eos"] = True
    if target.api == "chat":
        return {**common, "messages": messages}
    return {**common, "prompt": "\n".join(m["content"] for m in messages)}


async def send(http: httpx.AsyncClient, target: Target, body: dict[str, Any], record: Record) -> None:
    """Send and read to the end; errors stand in the record."""
    path = "/v1/chat/completions" if target.api == "chat" else "/v1/completions"
    begun = time.perf_counter()
    try:
        async with http.stream("POST", target.url + path, json=body, headers=headers_of(target)) as response:
            if response.status_code != 200:
                await response.aread()
                record.error = f"HTTP {response.status_code}"
            else:
                await _read(response, record, begun)
    except httpx.HTTPError as error:
        record.error = type(error).__name__
    record.end_s = time.perf_counter() - begun
    if record.error is None and not record.pieces_s:
        record.error = "empty answer"


async def _read(response: httpx.Response, record: Record, begun: float) -> None:
    texts: list[str] = []
    rest = b""
    async for piece in response.aiter_bytes():
        at_s = time.perf_counter() - begun
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not line.startswith(DONE):
                _take(json.loads(line[5:]), record, texts, at_s)
    record.text = "".join(texts)
    record.output_tokens = record.output_tokens or len(record.pieces_s)


def _take(chunk: dict[str, Any], record: Record, texts: list[str], at_s: float) -> None:
    if "error" in chunk:
        record.error = str(chunk["error"].get("code") or chunk["error"].get("type"))
    for choice in chunk.get("choices") or ():
        text = (choice.get("delta") or {}).get("content") if "delta" in choice else choice.get("text")
        if text:
            texts.append(text)
            record.pieces_s.append(at_s)
    if usage := chunk.get("usage"):
        record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
