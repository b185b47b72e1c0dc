"""A real HTTP server on a loopback port around the fake service: what a client sees is what is tested."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from qwen3tts_hw.engine.service import SpeechService
from qwen3tts_hw.serving.routes import create_router
from qwen3tts_hw.settings import Settings
from tests.serving.fake_service import FakeService, model_config
from tests.serving.speech_server import DEADLINE_S, MODEL, SpeechServer, wait_until


def _serve(service: SpeechService) -> tuple[uvicorn.Server, threading.Thread]:
    app = FastAPI()
    app.include_router(create_router(lambda _: service, served_names=lambda _: (MODEL,)))
    # http "h11": of uvicorn's servers the one that is always installed.
    config = uvicorn.Config(app, host="127.0.0.1", port=0, ws="none", http="h11", log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    return server, thread


@pytest.fixture(scope="session")
def _running() -> Iterator[Callable[[FakeService], str]]:
    """Start one server per variant and keep it; the service in it is replaced for each test."""
    current: dict[str, FakeService] = {}
    running: list[tuple[uvicorn.Server, threading.Thread]] = []
    urls: dict[str, str] = {}

    class _Current:
        """Forwards to the service of the running test."""

        def __init__(self, key: str) -> None:
            self._key = key

        def __getattr__(self, name: str) -> Any:
            return getattr(current[self._key], name)

    def url_for(service: FakeService) -> str:
        key = service.config.variant
        current[key] = service
        if key not in urls:
            running.append(_serve(_Current(key)))  # type: ignore[arg-type]
            port = running[-1][0].servers[0].sockets[0].getsockname()[1]
            urls[key] = f"http://127.0.0.1:{port}"
        return urls[key]

    yield url_for
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(DEADLINE_S)


def _connect(service: FakeService, url: str) -> Iterator[SpeechServer]:
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        server = SpeechServer(service, url, client)
        yield server
        server.wait_all_closed()


@pytest.fixture
def server(_running: Callable[[FakeService], str]) -> Iterator[SpeechServer]:
    """A server of a custom-voice checkpoint; afterwards every stream must have been closed exactly once."""
    service = FakeService()
    yield from _connect(service, _running(service))


@pytest.fixture
def design_server(_running: Callable[[FakeService], str]) -> Iterator[SpeechServer]:
    """A server of a voice-design checkpoint."""
    service = FakeService(config=model_config("voice_design"))
    yield from _connect(service, _running(service))


@pytest.fixture
def base_server(_running: Callable[[FakeService], str], tmp_path: Path) -> Iterator[SpeechServer]:
    """A server of a checkpoint that clones voices, with an empty registry."""
    settings = Settings(voices_dir=str(tmp_path / "voices"), voices_max_count=3)
    service = FakeService(config=model_config("base"), settings=settings)
    yield from _connect(service, _running(service))
