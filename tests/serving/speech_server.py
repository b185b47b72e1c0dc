"""What the tests hold in their hands: a running server, the fake service in it, and a client of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.serving.fake_service import FakeService, Script

MODEL = "tiny-tts"
DEADLINE_S = 20.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; fail after a generous deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


@dataclass
class SpeechServer:
    """A running server, the service in it, and a client of it."""

    service: FakeService
    url: str
    client: httpx.Client

    def speak(self, **fields: Any) -> httpx.Response:
        """Send a good request, with fields changed; None removes one."""
        body = {"model": MODEL, "input": "Hello there.", "voice": "ryan", "seed": 7} | fields
        sent = {name: value for name, value in body.items() if value is not None}
        return self.client.post("/v1/audio/speech", json=sent)

    def send_raw(self, content: bytes, **headers: str) -> httpx.Response:
        """Send a body as it is."""
        sent = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        return self.client.post("/v1/audio/speech", content=content, headers=sent)

    def assert_speaks(self) -> None:
        """The server answers a good request."""
        self.service.script = Script()
        voice = "ryan" if self.service.config.speakers else None
        needed: dict[str, Any] = {}
        if self.service.config.variant == "voice_design":
            needed["instructions"] = "A calm voice."
        if self.service.config.variant == "base":
            needed["speaker_embedding"] = [0.5] * self.service.config.talker.hidden_size
        response = self.speak(response_format="pcm", voice=voice, **needed)
        assert response.status_code == 200, response.text
        assert len(response.content) == 7 * 1_920 * 2

    def assert_refused(self, response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
        """The answer is an error of OpenAI's shape, no stream was started for it, and the next request is served."""
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        assert set(response.json()) == {"error"}
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert error["message"]
        assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
        self.assert_speaks()
        return error

    def wait_all_closed(self) -> None:
        """Every stream that was started is closed in the end, and no stream is closed twice."""
        wait_until(lambda: all(stream.closes for stream in self.service.streams))
        assert [stream.closes for stream in self.service.streams] == [1] * len(self.service.streams)
