"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvarn.server.answers import ChatForm, CompletionForm
from kvarn.server.context import ServerContext
from kvarn.server.gate import tenant_of
from kvarn.server.respond import answer
from kvarn.server.routes.docs import ERRORS
from kvarn.server.schema.chat import ChatAnswer, ChatBody
from kvarn.server.schema.completions import CompletionAnswer, CompletionBody
from kvarn.server.translate import chat_asked, completion_asked, new_id, works

_STREAM: dict[str, Any] = {
    "description": "The answer; with stream: true, server-sent events that end with `data: [DONE]`.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def make_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["completions"])
    responses: dict[int | str, dict[str, Any]] = {200: _STREAM, **ERRORS}

    @router.post("/v1/completions", response_model=CompletionAnswer, responses=responses)
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue a text."""
        tenant = tenant_of(request.scope)
        asked = await completion_asked(context, body)
        wanted = await works(context, tenant, asked, new_id("cmpl"))
        echoes = [context.tokenizer.decode(p) for p in asked.prompts] if body.echo else []
        form = CompletionForm(
            wanted[0].request_id, context.model_name, context.tokenizer, body, echoes, body.max_tokens == 0
        )
        return await answer(context, request, tenant, body, form, wanted)

    @router.post("/v1/chat/completions", response_model=ChatAnswer, responses=responses)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        tenant = tenant_of(request.scope)
        asked = await chat_asked(context, body)
        wanted = await works(context, tenant, asked, new_id("chatcmpl"))
        form = ChatForm(wanted[0].request_id, context.model_name, context.tokenizer, body)
        return await answer(context, request, tenant, body, form, wanted)

    return router
