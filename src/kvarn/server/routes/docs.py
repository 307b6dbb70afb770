"""What the OpenAPI description says of errors."""

from __future__ import annotations

from typing import Any

from kvarn.server.schema.common import ErrorBody

_WORDS = {
    400: "The request is wrong, or can never fit.",
    401: "No valid API key.",
    403: "For admins only.",
    404: "No such model.",
    408: "The body or the answer took too long.",
    413: "The body is too large.",
    429: "Too much is open; Retry-After says when to come again.",
    500: "The server failed.",
    503: "The server is ending, or the cache ran out.",
}
ERRORS: dict[int | str, dict[str, Any]] = {s: {"model": ErrorBody, "description": w} for s, w in _WORDS.items()}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {s: ERRORS[s] for s in statuses}
