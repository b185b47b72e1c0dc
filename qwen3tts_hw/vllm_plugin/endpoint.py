"""The routes' attachment to vLLM's API server: the ``vllm.endpoint_plugins`` entry point.

Before vLLM 0.26, which has no such group, :mod:`qwen3tts_hw.vllm_plugin.registration` calls it.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from qwen3tts_hw.checkpoint.reader import open_checkpoint, resolve_directory
from qwen3tts_hw.config import MODEL_TYPE
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from qwen3tts_hw.serving.errors import HttpError
from qwen3tts_hw.serving.routes import create_router, health_response
from qwen3tts_hw.vllm_plugin.choices import settings_of
from qwen3tts_hw.vllm_plugin.service import VllmSpeechService

logger = logging.getLogger(__name__)

_STATE = "qwen3tts_service"


class SpeechEndpoint:
    """vLLM's endpoint-plugin protocol: attach the routes, then get the engine."""

    name = "qwen3tts_hw"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Phase A: add the routes; the engine does not exist yet."""
        app.include_router(create_router(_service, served_names=_served_names, health=False))
        app.add_api_route("/health", _health, methods=["GET"], response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Phase B: build the service if a Qwen3-TTS checkpoint is served."""
        if not _serves_speech(engine_client):
            return
        setattr(state, _STATE, build_service(engine_client))
        logger.info("speech routes ready: POST /v1/audio/speech, GET /v1/audio/voices")


def build_service(engine_client: Any) -> VllmSpeechService:
    """The speech service over an engine client, from the checkpoint it serves."""
    model = engine_client.model_config
    directory = resolve_directory(model.model, model.revision)
    checkpoint = open_checkpoint(directory)
    return VllmSpeechService(
        engine_client,
        checkpoint.config,
        TextTokenizer.from_directory(directory),
        settings_of(engine_client.vllm_config),
        max_rows=model.max_model_len,
        voice_fingerprint=checkpoint.voice_fingerprint(),
    )


def _service(request: Request) -> VllmSpeechService:
    state = request.app.state
    service = getattr(state, _STATE, None)
    if service is None:
        client = getattr(state, "engine_client", None)
        if not _serves_speech(client):
            raise HttpError(
                404, "this server does not run a Qwen3-TTS checkpoint", param="model", code="model_not_found"
            )
        service = build_service(client)
        setattr(state, _STATE, service)
    return service


def _serves_speech(engine_client: Any) -> bool:
    return engine_client is not None and engine_client.model_config.hf_config.model_type == MODEL_TYPE


async def _health(request: Request) -> Response:
    """vLLM's health route; with a speech checkpoint it also says what serves it."""
    client = getattr(request.app.state, "engine_client", None)
    if _serves_speech(client):
        return await health_response(_service(request))
    try:
        if client is not None:
            await client.check_health()
    except Exception:
        logger.exception("the engine is not healthy")
        return Response(status_code=503)
    return Response(status_code=200)


def _served_names(request: Request) -> list[str]:
    models = getattr(request.app.state, "openai_serving_models", None)
    return [path.name for path in models.base_model_paths] if models is not None else []
