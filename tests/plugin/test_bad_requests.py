"""Bad input over real HTTP: an error of OpenAI's shape that names the field, and the next good request is served."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.plugin.server import SpeechServer, speech_body

pytestmark = pytest.mark.vllm

GOOD = {"text": "A good one.", "max_new_tokens": 3}
LIMIT_BYTES = 262_144
HUGE = b'{"input": "' + b"a" * 1_000_000 + b'", "voice": "ryan"}'

FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "empty text": ("input", {"text": ""}),
    "blank text": ("input", {"text": " \n\t"}),
    "text over the limit": ("input", {"text": "word " * 4_001}),
    "text of a wrong type": ("input", {"text": ["a", "b"]}),
    "no voice": ("voice", {"voice": None}),
    "unknown voice": ("voice", {"voice": "nobody"}),
    "voice of a wrong type": ("voice", {"voice": 3}),
    "unknown language": ("language", {"language": "klingon"}),
    "a dialect as language": ("language", {"language": "beijing_dialect"}),
    "unknown text mode": ("text_mode", {"text_mode": "backwards"}),
    "negative temperature": ("temperature", {"temperature": -0.1}),
    "huge temperature": ("temperature", {"temperature": 1e30}),
    "temperature as text": ("temperature", {"temperature": "hot"}),
    "negative top_k": ("top_k", {"top_k": -1}),
    "huge top_k": ("top_k", {"top_k": 10**12}),
    "fractional top_k": ("top_k", {"top_k": 1.5}),
    "top_p of zero": ("top_p", {"top_p": 0.0}),
    "huge top_p": ("top_p", {"top_p": 2.0}),
    "negative penalty": ("repetition_penalty", {"repetition_penalty": -1.0}),
    "huge penalty": ("repetition_penalty", {"repetition_penalty": 1e9}),
    "negative seed": ("seed", {"seed": -1}),
    "huge seed": ("seed", {"seed": 2**64}),
    "no frames": ("max_new_tokens", {"max_new_tokens": 0}),
    "too many frames": ("max_new_tokens", {"max_new_tokens": 10**9}),
    "unsupported format": ("response_format", {"response_format": "mp3"}),
    "unsupported speed": ("speed", {"speed": 1.5}),
    "misspelt field": ("temprature", {"temprature": 1.0}),
    "stream of a wrong type": ("stream", {"stream": "yes"}),
}
BODIES = {
    "NaN": (400, "temperature", b'{"input": "Hi.", "voice": "ryan", "temperature": NaN}'),
    "infinity": (400, "top_p", b'{"input": "Hi.", "voice": "ryan", "top_p": Infinity}'),
    "1 MB of JSON": (413, None, HUGE),
    "invalid UTF-8": (400, None, b'{"input": "\xff\xfe", "voice": "ryan"}'),
    "unpaired surrogate": (400, "input", b'{"input": "\\ud800", "voice": "ryan"}'),
    "no JSON": (400, None, b"Hello there."),
    "truncated JSON": (400, None, b'{"input": "Hi.'),
    "nothing": (400, None, b""),
    "a list": (400, None, b"[1, 2]"),
    "deep nesting": (400, None, b'{"input": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "a field twice": (400, "input", b'{"input": "Hi.", "input": "Ho.", "voice": "ryan"}'),
}


def assert_refused(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    """The answer is an error of OpenAI's shape about this field."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error


def post(server: SpeechServer, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/audio/speech", json=speech_body(**{"text": "Hi.", **fields}))


def assert_speaks(server: SpeechServer, **fields: Any) -> None:
    assert len(server.speak(**GOOD | fields).codes) == GOOD["max_new_tokens"]


@pytest.mark.server("standard")
@pytest.mark.parametrize(("param", "fields"), FIELDS.values(), ids=FIELDS)
def test_a_bad_value(server: SpeechServer, param: str, fields: dict[str, Any]) -> None:
    admitted = server.worker()["admitted"]
    assert_refused(post(server, **fields), 400, param)
    assert server.worker()["admitted"] == admitted
    assert_speaks(server)


@pytest.mark.server("standard")
@pytest.mark.parametrize(("status", "param", "body"), BODIES.values(), ids=BODIES)
def test_a_bad_body(server: SpeechServer, status: int, param: str | None, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert_refused(server.client.post("/v1/audio/speech", content=body, headers=headers), status, param)
    assert_speaks(server)


@pytest.mark.server("standard")
def test_another_model(server: SpeechServer) -> None:
    error = assert_refused(post(server, model="tts-1"), 404, "model")
    assert str(server.checkpoint) in error["message"]
    assert_speaks(server, model=str(server.checkpoint))


@pytest.mark.server("standard")
def test_an_unknown_request_id(server: SpeechServer) -> None:
    assert_refused(server.client.get("/v1/audio/speech/speech-0"), 404, "request_id")


@pytest.mark.server("standard")
def test_the_error_names_what_would_work(server: SpeechServer) -> None:
    voices = json.loads(server.client.get("/v1/audio/voices").text)["voices"]
    message = assert_refused(post(server, voice="nobody"), 400, "voice")["message"]
    assert all(voice["id"] in message for voice in voices)
    message = assert_refused(post(server, response_format="mp3"), 400, "response_format")["message"]
    assert "wav" in message
    assert "pcm" in message


@pytest.mark.server("recording")
def test_instructions_for_a_checkpoint_that_takes_none(server: SpeechServer) -> None:
    error = assert_refused(post(server, instructions="Whisper."), 400, "instructions")
    assert "0.6B" in error["message"]
    assert_speaks(server)


@pytest.mark.server("tight")
def test_a_voice_for_a_checkpoint_that_has_none(server: SpeechServer) -> None:
    good = {"voice": None, "instructions": "A calm voice."}
    assert_refused(post(server, **good | {"voice": "ryan"}), 400, "voice")
    assert_refused(post(server, **good | {"instructions": None}), 400, "instructions")
    assert_speaks(server, **good)


@pytest.mark.server("tight")
def test_a_prompt_longer_than_the_server_was_started_for(server: SpeechServer) -> None:
    good = {"voice": None, "instructions": "A calm voice."}
    error = assert_refused(post(server, **good, text="word " * 500), 400, "input")
    assert "--max-model-len" in error["message"]
    assert_speaks(server, **good)
