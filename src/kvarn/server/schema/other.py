"""Models, tokens, health."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from kvarn.server.schema.chat import ChatMessage
from kvarn.server.schema.common import Body, TokenId


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeBody(Body):
    """A prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=10_000)
    add_special_tokens: bool | None = Field(None, description="Null: as the model wants it.")
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(max_length=1_000_000)


class DetokenizeAnswer(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ok", "stalled", "stopped", "draining"]
    stalled_s: float
    open_requests: int
