"""Every error of the API in OpenAI's form, with the status that clients act on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvarn.core.errors import DoesNotFit, KvarnError, UnknownName
from kvarn.engine.reasons import Ended, Expired

log = logging.getLogger("kvarn.server")
CLIENT_GONE = 499  # logged only: nobody is there to read it
SHOWN_CHARS = 300
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error with its HTTP status. param: the field concerned. code: a word that programs can act on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        fixes: tuple[str, ...] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.fixes = status, message, code, param, fixes
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                "fixes": list(self.fixes),
            }
        }


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def from_kvarn(error: KvarnError) -> ApiError:
    """The status of an error that Kvarn raised on purpose about a request."""
    code = None
    if isinstance(error, DoesNotFit):
        code = "context_length_exceeded"
    elif isinstance(error, UnknownName):
        code = "unknown_name"
    return ApiError(400, error.message, code=code, fixes=error.fixes)


def from_exception(error: Exception) -> ApiError:
    """Any error; what was not raised on purpose is logged and tells the client nothing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, KvarnError):
        return from_kvarn(error)
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def from_ended(ended: Ended | None, error: str | None) -> ApiError:
    """Why the engine ended a request before its end."""
    if isinstance(ended, Expired):
        return ApiError(408, f"timed out: {ended}", code="timeout", fixes=("a larger timeout", "fewer tokens"))
    if ended is not None:
        return ApiError(503, str(ended), code="out_of_cache", headers={"Retry-After": "1"})
    if error is not None and error.startswith("constraint: "):
        return ApiError(400, error, code="constraint_failed", param="response_format")
    return ApiError(500, "the engine failed on this request; the server's log says why", code="engine_error")


def to_json(value: Any) -> bytes:
    """UTF-8 JSON. A lone surrogate that a client sent comes back as its escape instead of breaking the answer."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, dict(headers or {}), "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


def _from_validation(error: RequestValidationError) -> ApiError:
    """The first wrong field, in one line."""
    first, *others = error.errors()
    where = ".".join(str(p) for p in first["loc"] if p != "body") or None
    also = f" (and {len(others)} more)" if others else ""
    what = str(first["msg"])[:SHOWN_CHARS]
    code = "unknown_parameter" if first["type"] == "extra_forbidden" else "invalid_value"
    if first["type"] == "too_long" and first.get("ctx", {}).get("max_length") == 0:
        what, code = "not supported here; send null", "unsupported"
    return invalid(f"{where or 'the body'}: {what}{also}", param=where, code=code)


def install(app: FastAPI) -> None:
    """All errors of the app's own routes take OpenAI's form."""

    async def api_error(request: Request, error: Exception) -> Response:
        return error_response(from_exception(error))

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_from_validation(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(KvarnError, api_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
