"""Bodies that carry audio or files: how large they may be, and forms beside JSON. Knows nothing about voices."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.serving.body import parse_json_object, read_limited
from qwen3tts_hw.serving.errors import HttpError
from qwen3tts_hw.settings import Settings

_MAX_FORM_PARTS = 16
_BASE64_CHARACTERS = 4 / 3 * 31 / 30  # per byte, with line breaks


def body_limit(config: ModelConfig, settings: Settings) -> int:
    """Largest body of a request, in bytes: where voices are cloned, reference audio has room in it."""
    if config.variant != "base":
        return settings.max_body_bytes
    return settings.max_body_bytes + int(settings.ref_audio_max_bytes * _BASE64_CHARACTERS)


async def read_fields(request: Request, max_bytes: int) -> Mapping[str, Any]:
    """The fields of a JSON object or of a multipart form; a file is its bytes. Raises HttpError 400, 413 or 415."""
    declared = request.headers.get("content-type", "application/json")
    media_type = declared.partition(";")[0].strip().lower()
    if media_type not in ("application/json", "multipart/form-data"):
        raise HttpError(
            415,
            f"Content-Type is {media_type!r}; multipart/form-data or application/json was expected",
            code="media_type",
        )
    raw = await read_limited(request, max_bytes)
    return parse_json_object(raw) if media_type == "application/json" else await _form(raw, request.headers)


async def _form(raw: bytes, headers: Headers) -> Mapping[str, Any]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield raw

    parser = MultiPartParser(
        headers,
        stream(),
        max_files=_MAX_FORM_PARTS,
        max_fields=_MAX_FORM_PARTS,
        max_part_size=max(len(raw), 1),
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise HttpError(400, f"the form is malformed: {error}", code="invalid_form") from None
    fields: dict[str, Any] = {}
    try:
        for name, value in form.multi_items():
            if name in fields:
                raise HttpError(400, f"{name[:64]!r} is given more than once", param=name[:64], code="duplicate_field")
            fields[name] = await value.read() if isinstance(value, UploadFile) else value
    finally:
        await form.close()
    return fields
