"""How a server ends: stopped, killed, with and without requests; what its clients see and what it leaves behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.plugin.answers import SpeechFailedError
from tests.plugin.pool import FEW_BLOCKS, SERVERS
from tests.plugin.server import SpeechServer, wait_for

pytestmark = pytest.mark.vllm

LONG = {"text": "It is still speaking.", "max_new_tokens": 4_000}
VOICES: dict[str, dict[str, Any]] = {
    "custom_voice": {},
    "voice_design": {"voice": None, "instructions": "-"},
    "base": {"voice": None, "speaker_embedding": [0.1] * 64},  # the tiny sizes' width
}
KILLED = "recording"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.server(name, last=True)) for name in SERVERS if name != KILLED],
)
def test_a_stopped_server_leaves_nothing(server: SpeechServer, name: str, figure: Callable[[str], None]) -> None:
    """With requests running: their clients are told or cut off, never left waiting."""
    fields = LONG | VOICES[SERVERS[name].checkpoint.variant]
    if FEW_BLOCKS[0] in SERVERS[name].arguments:  # little cache: what is asked for must fit
        fields = fields | {"max_new_tokens": 100, "temperature": 1.0}
    running = threading.Semaphore(0)

    def speak() -> bool:
        running.release()
        try:
            server.speak(**fields)
        except (SpeechFailedError, httpx.HTTPError):
            return False
        return True

    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(speak) for _ in range(3)]
        for _ in answers:
            running.acquire()
        wait_for(lambda: server.stats()["running"], seconds=30.0, message="no request runs")
        remains = server.stop()
        complete = [answer.result(timeout=60) for answer in answers]
    remains.assert_nothing()
    figure(f"server {name} stopped in {remains.seconds:.1f} s with requests running, {sum(complete)} of 3 completed")


@pytest.mark.server(KILLED, last=True)
def test_a_killed_worker_is_noticed(server: SpeechServer) -> None:
    worker = psutil.Process(server.worker()["pid"])
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(server.speak, **LONG) for _ in range(2)]
        wait_for(lambda: server.worker()["requests_open"] == 2, seconds=30.0, message="the requests do not run")
        worker.send_signal(signal.SIGKILL)
        for answer in answers:
            with pytest.raises((SpeechFailedError, httpx.HTTPError)):
                answer.result(timeout=60)
    # vLLM may end the server once it knows that its engine is dead; until then it says so.
    wait_for(lambda: health_status(server) in (503, None), seconds=30.0, message="/health says that all is well")
    remains = server.stop()
    assert remains.processes == []
    assert remains.shared_memory == []


def health_status(server: SpeechServer) -> int | None:
    try:
        return server.client.get("/health").status_code
    except httpx.HTTPError:
        return None
