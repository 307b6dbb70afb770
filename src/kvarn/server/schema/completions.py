"""/v1/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from kvarn.server.schema.common import KvarnReport, Shared, Texts, TokenIds, Usage


class CompletionBody(Shared):
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        description="A text, token ids, or a list of either."
    )
    max_tokens: int | None = Field(16, ge=0, le=2**31 - 1)
    logprobs: int | None = Field(None, ge=0, le=100, description="The likeliest N beside each token.")
    echo: bool | None = Field(False, description="The prompt before the answer.")
    best_of: int | None = Field(None, ge=1, le=128, description="Must equal n.")
    suffix: str | None = Field(None, description="Must be null.")


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kvarn: KvarnReport | None = None
