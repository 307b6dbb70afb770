"""/v1/models, /tokenize, /detokenize."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.context import ServerContext
from kvarn.server.errors import ApiError, invalid, json_response
from kvarn.server.routes.docs import ERRORS, errors
from kvarn.server.schema.other import (
    DetokenizeAnswer,
    DetokenizeBody,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeBody,
)
from kvarn.server.translate import chat_ids


def make_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["models and tokens"])
    card = {
        "id": context.model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "kvarn",
        "max_model_len": context.most_tokens,
    }

    @router.get("/v1/models", response_model=ModelList, responses=errors(401))
    async def models() -> Response:
        """The model that is served."""
        return json_response({"object": "list", "data": [card]})

    @router.get("/v1/models/{model:path}", response_model=ModelCard, responses=errors(401, 404))
    async def model(model: str) -> Response:
        """One model."""
        context.check_model(model)
        return json_response(card)

    @router.post("/tokenize", response_model=TokenizeAnswer, responses=ERRORS)
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text, or of a conversation as the model's chat template writes it."""
        context.check_model(body.model)
        ids = await _ids(context, body)
        answer = {"count": len(ids), "max_model_len": context.most_tokens, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [context.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
        return json_response(answer)

    @router.post("/detokenize", response_model=DetokenizeAnswer, responses=ERRORS)
    async def detokenize(body: DetokenizeBody) -> Response:
        """Text of token ids."""
        context.check_model(body.model)
        if bad := next((t for t in body.tokens if t >= context.vocab_size), None):
            raise invalid(f"token id {bad} is outside the vocabulary of {context.vocab_size}", param="tokens")
        text = await asyncio.to_thread(context.tokenizer.decode, body.tokens, skip_special=False)
        return json_response({"prompt": text})

    return router


async def _ids(context: ServerContext, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages")
    if body.messages is not None:
        return list(await chat_ids(context.tokenizer, body.messages, body.add_generation_prompt is not False))
    if body.prompt is None:
        raise ApiError(400, "give either prompt or messages")
    special = body.add_special_tokens is not False
    return await asyncio.to_thread(context.tokenizer.encode, body.prompt, add_special=special)
