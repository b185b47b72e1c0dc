"""The voice routes: list, register, look at, delete, export and import voices.

``POST /v1/audio/voices``
    A form or a JSON object: ``name``, ``consent`` (must be true), ``audio`` (a file; in JSON what ``ref_audio`` of a
    speech request may be), and optionally ``ref_text``, ``overwrite`` and the clean-up fields. 201, or 409 if the name
    is taken.
``GET /v1/audio/voices``, ``GET /v1/audio/voices/{name}``, ``DELETE /v1/audio/voices/{name}``
    Presets and registered voices; one of the latter; forget it. Requests that use it go on.
``GET /v1/audio/voices/{name}/export``, ``POST /v1/audio/voices/import``
    A registered voice as one file, and back: the file as the body, or as ``file`` of a form with ``name`` and
    ``overwrite``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from qwen3tts_hw.errors import RequestError, UnknownVoiceError
from qwen3tts_hw.prompt.request import check_cloning, check_reference_text
from qwen3tts_hw.serving.body import printable, read_limited
from qwen3tts_hw.serving.cloning import VoiceCloning
from qwen3tts_hw.serving.errors import HttpError
from qwen3tts_hw.serving.schemas import voices_object
from qwen3tts_hw.serving.uploads import body_limit, read_fields
from qwen3tts_hw.voice.cleanup import CleanupOptions
from qwen3tts_hw.voice.registry import VoiceRecord

logger = logging.getLogger(__name__)

_UPLOAD = ("name", "consent", "audio", "ref_text", "overwrite")
_CLEANUP = ("trim_silence", "normalize_loudness", "trailing_silence_ms")
_IMPORT = ("file", "name", "overwrite")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "")
_FILE_TYPE = "application/octet-stream"


class VoiceHandlers:
    """One method per route; they raise, and the router answers."""

    def __init__(self, get_cloning: Callable[[Request], VoiceCloning]) -> None:
        self._get_cloning = get_cloning

    async def list_voices(self, request: Request) -> Response:
        cloning = self._get_cloning(request)
        told = voices_object(cloning.config)
        if cloning.config.variant == "base":
            records = await asyncio.to_thread(cloning.registry.records)
            told["voices"] += [_described(cloning, record) for record in records]
        return JSONResponse(told)

    async def register_voice(self, request: Request) -> Response:
        cloning = self._get_cloning(request)
        fields = await read_fields(request, body_limit(cloning.config, cloning.settings))
        check_cloning(cloning.config, "audio")
        _check_known(fields, (*_UPLOAD, *_CLEANUP))
        overwrite = _flag(fields, "overwrite") or False
        name = cloning.registry.check_new(_required(fields, "name"), overwrite=overwrite)
        if not _flag(fields, "consent"):
            raise RequestError("consent", "consent must be true: the speaker has to agree to the use of their voice")
        audio, given = _required(fields, "audio"), fields.get("ref_text")
        text = check_reference_text(given, cloning.settings) if given not in (None, "") else ""
        if not isinstance(audio, str | bytes):
            raise RequestError("audio", "audio must be a file or a data URL")
        options = CleanupOptions.from_settings(
            cloning.settings,
            trim=_flag(fields, "trim_silence"),
            loudness=_flag(fields, "normalize_loudness"),
            silence_ms=_integer(fields, "trailing_silence_ms"),
        )
        heard = await cloning.hear(audio, options, with_codes=bool(text))
        record = await asyncio.to_thread(
            cloning.registry.add,
            name,
            heard.encoded,
            consent=True,
            reference_text=text,
            samples=heard.samples,
            overwrite=overwrite,
        )
        logger.info("voice %s registered", record.name)
        return JSONResponse({**_described(cloning, record), "advice": list(heard.advice)}, status_code=201)

    async def get_voice(self, request: Request) -> Response:
        cloning = self._get_cloning(request)
        return JSONResponse(_described(cloning, await _found(cloning, _name(request))))

    async def delete_voice(self, request: Request) -> Response:
        cloning, name = self._get_cloning(request), _name(request)
        check_cloning(cloning.config, "voice")
        try:
            record = await asyncio.to_thread(cloning.registry.delete, name)
        except UnknownVoiceError as error:
            raise _not_found(error) from None
        logger.info("voice %s deleted", record.name)
        return JSONResponse({"id": record.name, "deleted": True})

    async def export_voice(self, request: Request) -> Response:
        cloning = self._get_cloning(request)
        record = await _found(cloning, _name(request))
        data = await asyncio.to_thread(cloning.registry.export, record.name)
        headers = {"content-disposition": f'attachment; filename="{record.name}.safetensors"'}
        return Response(data, headers=headers, media_type=_FILE_TYPE)

    async def import_voice(self, request: Request) -> Response:
        cloning = self._get_cloning(request)
        limit = body_limit(cloning.config, cloning.settings)
        declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if declared == "multipart/form-data":
            fields = await read_fields(request, limit)
        else:
            fields = {**request.query_params, "file": await read_limited(request, limit)}
        check_cloning(cloning.config, "file")
        _check_known(fields, _IMPORT)
        data = _required(fields, "file")
        if not isinstance(data, bytes):
            raise RequestError("file", "file must be a file")
        overwrite = _flag(fields, "overwrite") or False
        record = await asyncio.to_thread(
            cloning.registry.import_file, data, name=fields.get("name"), overwrite=overwrite
        )
        logger.info("voice %s imported", record.name)
        return JSONResponse(_described(cloning, record), status_code=201)


def _described(cloning: VoiceCloning, record: VoiceRecord) -> dict[str, Any]:
    return {
        "id": record.name,
        "name": record.name,
        "registered": True,
        "created": record.created,
        "consent": record.consent,
        "ref_text": record.reference_text or None,
        "reference_frames": record.reference_frames,
        "seconds": record.seconds,
        "has_audio": record.has_audio,
        "usable": cloning.registry.usable(record),
    }


async def _found(cloning: VoiceCloning, name: str) -> VoiceRecord:
    check_cloning(cloning.config, "voice")
    try:
        return await asyncio.to_thread(cloning.registry.get, name)
    except UnknownVoiceError as error:
        raise _not_found(error) from None


def _not_found(error: UnknownVoiceError) -> HttpError:
    return HttpError(404, error.message, param="name", code="unknown_voice")


def _name(request: Request) -> str:
    return str(request.path_params["name"])


def _required(fields: Mapping[str, Any], field: str) -> Any:
    value = fields.get(field)
    if value is None or value in ("", b""):
        raise HttpError(400, f"{field} is required", param=field, code="missing_field")
    return value


def _check_known(fields: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for field in fields:
        if field not in known:
            shown = printable(field)
            raise HttpError(
                400, f"unknown field {shown!r}; known fields: {', '.join(known)}", param=shown, code="unknown_field"
            )


def _flag(fields: Mapping[str, Any], field: str) -> bool | None:
    """A field that is true or false, in JSON or as a form spells it."""
    value = fields.get(field)
    if value is None or isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    if not isinstance(value, str) or text not in (*_TRUE, *_FALSE):
        raise HttpError(400, f"{field} must be true or false", param=field, code="invalid_type")
    return text in _TRUE


def _integer(fields: Mapping[str, Any], field: str) -> int | None:
    """A field that is an integer, in JSON or as a form spells it."""
    value = fields.get(field)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        return int(value)
    raise HttpError(400, f"{field} must be an integer", param=field, code="invalid_type")
