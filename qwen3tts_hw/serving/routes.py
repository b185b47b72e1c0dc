"""The routes: speech, its outcome, the voices, the counters, the health.

``POST /v1/audio/speech``
    OpenAI's speech request. By default the body is sent as it is made (``stream`` false waits for all of it);
    ``response_format`` is wav (the default, since mp3 is not made here) or pcm; ``stream_format`` "sse" sends events.
    The first chunk is awaited before the answer starts, so that what fails until then has its proper status.
``GET /v1/audio/speech/{request_id}``
    How a recent request ended. A chunked body cannot say so: its headers are gone by then, and HTTP/1.1 trailers are
    refused by uvicorn (0.54 raises on ``http.response.trailers``). The id is in the answer's ``x-request-id`` header;
    only the process that served the request knows it.
``GET /v1/audio/stats``, ``GET /health``
    Counters; 200 with the chosen code paths, or 503.
``/v1/audio/voices``
    See :mod:`qwen3tts_hw.serving.voices`.

Knows the engine only as a :class:`~qwen3tts_hw.engine.service.SpeechService`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from qwen3tts_hw.engine.service import SpeechService
from qwen3tts_hw.prompt.request import SpeechRequest
from qwen3tts_hw.serving.body import printable, read_json_object
from qwen3tts_hw.serving.cloning import VoiceCloning
from qwen3tts_hw.serving.errors import HttpError, error_object, error_response
from qwen3tts_hw.serving.schemas import SpeechBody, outcome_object, parse_speech_body, speech_request
from qwen3tts_hw.serving.streams import (
    AUDIO_MEDIA_TYPES,
    AudioFraming,
    EventFraming,
    SpeechRun,
    SpeechStreamResponse,
    while_connected,
)
from qwen3tts_hw.serving.uploads import body_limit
from qwen3tts_hw.serving.voices import VoiceHandlers
from qwen3tts_hw.serving.wav import wav_header
from qwen3tts_hw.types import SAMPLE_RATE_HZ

GetService = Callable[[Request], SpeechService]
GetServedNames = Callable[[Request], Collection[str]]
_Handler = Callable[[Request], Awaitable[Response]]


def create_router(
    get_service: GetService, *, served_names: GetServedNames | None = None, health: bool = True
) -> APIRouter:
    """Return the routes over the service that ``get_service`` finds for a request.

    ``get_service`` may raise :class:`~qwen3tts_hw.serving.errors.HttpError` where there is none. ``served_names`` tells
    which ``model`` names are answered; without it, or when it returns none, any name is. ``health`` false leaves
    ``/health`` to the application.
    """
    handlers = _Handlers(get_service, served_names)
    router = APIRouter()
    router.add_api_route(
        "/v1/audio/speech",
        _answering_errors(handlers.create_speech),
        methods=["POST"],
        name="create_speech",
        response_model=None,
        openapi_extra=_openapi_body(),
    )
    voices = VoiceHandlers(handlers.cloning)
    routes: list[tuple[str, str, _Handler]] = [
        ("GET", "/v1/audio/speech/{request_id}", handlers.get_outcome),
        ("GET", "/v1/audio/stats", handlers.get_stats),
        ("GET", "/v1/audio/voices", voices.list_voices),
        ("POST", "/v1/audio/voices", voices.register_voice),
        ("POST", "/v1/audio/voices/import", voices.import_voice),
        ("GET", "/v1/audio/voices/{name}", voices.get_voice),
        ("DELETE", "/v1/audio/voices/{name}", voices.delete_voice),
        ("GET", "/v1/audio/voices/{name}/export", voices.export_voice),
    ]
    if health:
        routes.append(("GET", "/health", handlers.get_health))
    for method, path, handler in routes:
        name = getattr(handler, "__name__", path)
        router.add_api_route(path, _answering_errors(handler), methods=[method], name=name, response_model=None)
    return router


class Turns:
    """Lets one request begin per turn of the event loop.

    Beginning costs a millisecond of the loop's time. Of a hundred requests that arrive at once each begins in a turn of
    its own, so that between any two of them the audio of running requests is passed on.
    """

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    async def next(self) -> None:
        """Wait for a turn in which nobody else begins."""
        async with self._one_at_a_time:
            await asyncio.sleep(0)


class _Handlers:
    """One method per route; they raise, and :func:`_answering_errors` answers."""

    def __init__(self, get_service: GetService, served_names: GetServedNames | None) -> None:
        self._get_service, self._served_names = get_service, served_names
        self._cloning: VoiceCloning | None = None
        self._turns = Turns()

    def cloning(self, request: Request) -> VoiceCloning:
        """What makes voices for the service; one as long as the service stays the same."""
        service, known = self._get_service(request), self._cloning
        if known is None or known.settings is not service.settings or known.config is not service.config:
            known = self._cloning = VoiceCloning(service)
        return known

    async def create_speech(self, request: Request) -> Response:
        await self._turns.next()
        service = self._get_service(request)
        limit = body_limit(service.config, service.settings)
        body = parse_speech_body(await read_json_object(request, limit))
        if self._served_names is not None and body.model is not None:
            _check_model(body.model, self._served_names(request))
        voice = await self.cloning(request).voice_for(body)
        wanted = speech_request(body, service.config, service.settings, voice=voice)
        return await _answer(request, service, body, wanted)

    async def get_outcome(self, request: Request) -> Response:
        request_id = str(request.path_params["request_id"])
        outcome = self._get_service(request).outcome(request_id)
        if outcome is None:
            raise HttpError(
                404,
                f"no outcome for request {printable(request_id)!r}: it is unknown, still running, or long gone",
                param="request_id",
                code="unknown_request",
            )
        return JSONResponse(outcome_object(outcome))

    async def get_stats(self, request: Request) -> Response:
        return JSONResponse(await self._get_service(request).stats())

    async def get_health(self, request: Request) -> Response:
        return await health_response(self._get_service(request))


async def health_response(service: SpeechService) -> JSONResponse:
    """200 with what the service says of itself, or 503 if it cannot."""
    try:
        return JSONResponse({"status": "ok", **await service.health()})
    except Exception as error:  # noqa: BLE001  whatever it is, the engine cannot say that it is well
        unwell = HttpError(503, f"the engine is not healthy: {error}", code="unhealthy")
        return JSONResponse({"status": "unhealthy", **error_object(unwell)}, status_code=503)


async def _answer(request: Request, service: SpeechService, body: SpeechBody, wanted: SpeechRequest) -> Response:
    """Start the request and answer once there is audio; the stream is closed here unless the response owns it."""
    run = SpeechRun(await service.submit(wanted, include_codes=bool(body.include_codes)))
    handed_on = False
    try:
        headers = {
            "x-request-id": run.request_id,
            "x-seed": str(wanted.sampling.seed),
            "x-sample-rate": str(SAMPLE_RATE_HZ),
        }
        if not body.streaming:
            return await _whole_answer(request, run, body, headers)
        first = await while_connected(request.receive, run.next_chunk())
        assert first is not None
        framing = EventFraming(body.audio_format) if body.sse else AudioFraming(body.audio_format)
        headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must pass chunks on at once
        response = SpeechStreamResponse(run, first, framing, headers)
        handed_on = True
        return response
    finally:
        if not handed_on:
            await run.close()


async def _whole_answer(request: Request, run: SpeechRun, body: SpeechBody, headers: dict[str, str]) -> Response:
    pcm = await while_connected(request.receive, run.collect())
    outcome = run.outcome
    assert outcome is not None
    headers |= {"x-finish-reason": outcome.finish_reason.value, "x-frames": str(outcome.frames)}
    audio = wav_header(len(pcm)) + pcm if body.audio_format == "wav" else pcm
    return Response(audio, headers=headers, media_type=AUDIO_MEDIA_TYPES[body.audio_format])


def _answering_errors(handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler so that whatever it raises becomes an answer in OpenAI's shape."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001  the request boundary; error_response logs what is not the client's
            return error_response(error, where=f"{request.method} {request.scope['path']}")

    return endpoint


def _check_model(name: str, served: Collection[str]) -> None:
    if served and name not in served:
        raise HttpError(
            404,
            f"the model {printable(name)!r} is not served here; served: {', '.join(sorted(served))}",
            param="model",
            code="model_not_found",
        )


def _openapi_body() -> dict[str, Any]:
    """Describe the body in the API schema, since the route reads it by itself."""
    schema = SpeechBody.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
