"""The routes' attachment to vLLM's API server: ``vllm.endpoint_plugins`` entry point, and what wraps build_app before 0.26."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from qwen3tts_hw.checkpoint.reader import resolve_directory
from qwen3tts_hw.config import MODEL_TYPE, ModelConfig
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from qwen3tts_hw.serving.routes import create_router
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
        app.include_router(create_router(_service, served_names=_served_names))
        app.add_exception_handler(_NotServed, _not_served)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Phase B: build the service if a Qwen3-TTS checkpoint is served."""
        if engine_client is None or engine_client.model_config.hf_config.model_type != MODEL_TYPE:
            return
        setattr(state, _STATE, build_service(engine_client))
        logger.info("speech routes ready: POST /v1/audio/speech, GET /v1/audio/voices")


class _NotServed(Exception):  # noqa: N818  # a routing outcome, not an error of ours
    """The server runs another model than Qwen3-TTS."""


def build_service(engine_client: Any) -> VllmSpeechService:
    """The speech service over an engine client, from the checkpoint it serves."""
    model = engine_client.model_config
    directory = resolve_directory(model.model, model.revision)
    return VllmSpeechService(
        engine_client,
        ModelConfig.from_directory(directory),
        TextTokenizer.from_directory(directory),
        settings_of(engine_client.vllm_config),
        max_rows=model.max_model_len,
    )


def _service(request: Request) -> VllmSpeechService:
    state = request.app.state
    service = getattr(state, _STATE, None)
    if service is None:
        client = getattr(state, "engine_client", None)
        if client is None or client.model_config.hf_config.model_type != MODEL_TYPE:
            raise _NotServed
        service = build_service(client)
        setattr(state, _STATE, service)
    return service  # type: ignore[no-any-return]  # app.state is untyped


def _served_names(request: Request) -> list[str]:
    models = getattr(request.app.state, "openai_serving_models", None)
    return [path.name for path in models.base_model_paths] if models is not None else []


async def _not_served(request: Request, error: Exception) -> JSONResponse:
    message = "this server does not run a Qwen3-TTS checkpoint"
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "param": "model"}}, 404)
