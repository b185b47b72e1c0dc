"""How errors look over HTTP: the OpenAI shape, one status per kind of error.

The only place that maps the package's exceptions to statuses. What is not one of them is a defect: it is logged with
its traceback and answered without its text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from qwen3tts_hw.errors import (
    CapacityError,
    GenerationError,
    Qwen3TTSError,
    RequestError,
    StorageError,
    UnknownVoiceError,
    UnsupportedError,
    VoiceExistsError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is what access logs call a client that left
_INVALID, _SERVER = "invalid_request_error", "server_error"


class HttpError(Qwen3TTSError):
    """A request refused at the HTTP level: status and the four members of OpenAI's error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = _INVALID if status < 500 else _SERVER
        self.headers: dict[str, str] = {}


def as_http_error(error: Exception) -> HttpError:
    """Map any exception to what the client is told."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, UnknownVoiceError):
        return HttpError(400, error.message, param=error.field, code="unknown_voice")
    if isinstance(error, VoiceExistsError):
        return HttpError(409, error.message, param=error.field, code="voice_exists")
    if isinstance(error, RequestError):
        return HttpError(400, error.message, param=error.field)
    if isinstance(error, UnsupportedError):
        return HttpError(400, str(error), code="unsupported")
    if isinstance(error, CapacityError):
        refused = HttpError(503, str(error) or "no room for the request now; try again", code="overloaded")
        refused.headers["Retry-After"] = str(RETRY_AFTER_S)
        return refused
    if isinstance(error, StorageError):
        return HttpError(507, str(error), code="insufficient_storage")
    if isinstance(error, GenerationError):
        return HttpError(500, f"speech generation failed: {error}", code="generation_failed")
    return HttpError(500, "internal error; the server's log has the details", code="internal_error")


def error_object(error: HttpError) -> Mapping[str, Any]:
    """Return the body of an error answer: ``{"error": {"message", "type", "param", "code"}}``."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: Exception, *, where: str) -> Response:
    """Answer with an error; failures on the server's side are logged, with the traceback when they are defects."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    told = as_http_error(error)
    log_failure(error, where=where)
    return JSONResponse(error_object(told), status_code=told.status, headers=told.headers)


def log_failure(error: Exception, *, where: str) -> None:
    """Log an error that is not the client's: in one line if it is expected, with its traceback if it is a defect."""
    if as_http_error(error).status != 500:
        return
    defect = not isinstance(error, Qwen3TTSError)
    logger.error("%s failed: %s: %s", where, type(error).__name__, error, exc_info=error if defect else None)
