"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from kvarn.server.schema.common import Body, KvarnReport, Shared, Usage


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    # what an earlier answer's message may carry along; only null says nothing that would be lost
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = Field(None, max_length=0)


class ChatBody(Shared):
    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Null: what the context leaves.")
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Goes before max_tokens.")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=100)
    tools: list[Any] | None = Field(None, max_length=0, description="Tools are not supported.")
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = Field(None, description="Accepted and not used.")
    modalities: list[Literal["text"]] | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprobBody]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    kvarn: KvarnReport | None = None
