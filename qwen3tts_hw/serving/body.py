"""From the bytes of an HTTP request to one JSON object, within a size limit, with an exact reason when it fails.

Stricter than ``json.loads``: duplicate keys, non-finite numbers and unpaired surrogates are refused, since what they
were meant to say would be lost or would fail much later. Knows nothing about speech.
"""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.requests import Request

from qwen3tts_hw.serving.errors import HttpError

_DRAIN_FACTOR = 16  # a refused body up to this many limits is read and dropped, so that the client can read the answer


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Read and parse the body; raise HttpError 400, 413 or 415, or ClientDisconnect."""
    _check_media_type(request)
    return parse_json_object(await read_limited(request, max_bytes))


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parse one JSON object strictly; raise HttpError 400 naming the field where there is one to name."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise _malformed("the body is empty; a JSON object was expected")
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise _malformed("the body's JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # Python converts no more than some thousand digits
        raise _malformed("the body holds an integer of too many digits") from None
    if not isinstance(value, dict):
        raise _malformed(f"the body is a JSON {json_type(value)}; an object was expected")
    for field, item in value.items():
        _check_value(field, item)
    return value


def json_type(value: object) -> str:
    """Name a decoded value's type as JSON does."""
    for types, name in (
        (bool, "boolean"),
        (int | float, "number"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    ):
        if isinstance(value, types):
            return name
    return "null"


def _check_media_type(request: Request) -> None:
    """Refuse what is not JSON by its own account; a missing Content-Type is taken for JSON."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(
            415, f"Content-Encoding {encoding!r} is not supported; send the body uncompressed", code="encoding"
        )
    declared = request.headers.get("content-type")
    if declared is None:
        return
    media_type, *parameters = (part.strip().lower() for part in declared.split(";"))
    if media_type != "application/json":
        raise HttpError(415, f"Content-Type is {media_type!r}; application/json was expected", code="media_type")
    for parameter in parameters:
        name, _, charset = parameter.partition("=")
        if name.strip() == "charset" and charset.strip(' "') not in ("utf-8", "utf8"):
            raise HttpError(415, f"charset {charset!r} is not supported; JSON is sent as UTF-8", code="charset")


async def read_limited(request: Request, max_bytes: int) -> bytes:
    """Read at most ``max_bytes``; a longer body is refused, by its Content-Length if it has one."""
    refused = HttpError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > _DRAIN_FACTOR * max_bytes:
        refused.headers["Connection"] = "close"
        raise refused
    received, chunks = 0, []
    async for chunk in request.stream():
        received += len(chunk)
        if received <= max_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
        if received > _DRAIN_FACTOR * max_bytes:
            refused.headers["Connection"] = "close"
            raise refused
    if received > max_bytes:
        raise refused
    return b"".join(chunks)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = printable(next(name for name in names if names.count(name) > 1))
        raise HttpError(400, f"{twice} is given more than once", param=twice, code="duplicate_field")
    return value


def _check_value(field: str, value: object) -> None:
    """Refuse values that Python's JSON reader lets pass and nothing behind it could keep."""
    name = printable(field)
    if isinstance(value, float) and not math.isfinite(value):
        raise HttpError(400, f"{name} is not a finite number; NaN and infinities are not JSON", param=name)
    try:
        json.dumps([field, value], ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        raise HttpError(400, f"{name} holds an unpaired surrogate, which is not text", param=name) from None
    except ValueError:
        raise HttpError(400, f"{name} holds a number that is not finite", param=name) from None
    except RecursionError:
        raise HttpError(400, f"{name} is nested too deeply", param=name) from None


def printable(name: str) -> str:
    """Return a client's field name short and encodable, to be repeated in an answer."""
    shown = name if len(name) <= 64 else name[:61] + "..."
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")


def _malformed(message: str) -> HttpError:
    return HttpError(400, message, code="invalid_json")
