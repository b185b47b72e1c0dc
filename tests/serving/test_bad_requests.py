"""Every bad request gets an error of OpenAI's shape that names the field, and the server answers the next good one."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from qwen3tts_hw.errors import CapacityError, GenerationError, RequestError, UnsupportedError
from tests.serving.fake_service import Script, model_config
from tests.serving.speech_server import SpeechServer


@pytest.mark.parametrize("text", ["", "   \n"], ids=["empty", "blank"])
def test_text_without_content(server: SpeechServer, text: str) -> None:
    server.assert_refused(server.speak(input=text), 400, "input")


def test_text_left_out(server: SpeechServer) -> None:
    error = server.assert_refused(server.speak(input=None), 400, "input")
    assert error["code"] == "missing_field"


def test_text_over_the_limit(server: SpeechServer) -> None:
    error = server.assert_refused(server.speak(input="a" * 20_001), 400, "input")
    assert "20000" in error["message"].replace(",", "").replace("_", "")


@pytest.mark.parametrize("voice", ["nobody", "alloy", {"id": "voice_1234"}], ids=["unknown", "openai", "object"])
def test_unknown_voice_lists_the_voices(server: SpeechServer, voice: Any) -> None:
    error = server.assert_refused(server.speak(voice=voice), 400, "voice")
    assert "ryan" in error["message"]
    assert "uncle_fu" in error["message"]


def test_voice_left_out_lists_the_voices(server: SpeechServer) -> None:
    error = server.assert_refused(server.speak(voice=None), 400, "voice")
    assert "ryan" in error["message"]


@pytest.mark.parametrize("voice", [3, ["ryan"], {"name": "ryan"}, {"id": 3}, {"id": "ryan", "x": 1}])
def test_voice_of_a_wrong_shape(server: SpeechServer, voice: Any) -> None:
    error = server.assert_refused(server.speak(voice=voice), 400, "voice")
    assert error["code"] == "invalid_type"


def test_a_voice_where_there_are_none(design_server: SpeechServer) -> None:
    response = design_server.speak(voice="ryan", instructions="An old man.")
    design_server.assert_refused(response, 400, "voice")


def test_a_dialect_is_chosen_through_its_voice(server: SpeechServer) -> None:
    error = server.assert_refused(server.speak(language="sichuan_dialect"), 400, "language")
    assert "uncle_fu" in error["message"]


@pytest.mark.parametrize("language", ["klingon", ""])
def test_unknown_language_lists_the_languages(server: SpeechServer, language: str) -> None:
    error = server.assert_refused(server.speak(language=language), 400, "language")
    assert "english" in error["message"]


def test_instructions_where_the_checkpoint_takes_none(server: SpeechServer) -> None:
    server.service.config = model_config(size_name="0b6")
    server.assert_refused(server.speak(instructions="Whisper."), 400, "instructions")


def test_unknown_text_mode(server: SpeechServer) -> None:
    server.assert_refused(server.speak(text_mode="backwards"), 400, "text_mode")


@pytest.mark.parametrize("name", ["mp3", "opus", "aac", "flac", "WAV", ""])
def test_unsupported_format_lists_the_supported(server: SpeechServer, name: str) -> None:
    error = server.assert_refused(server.speak(response_format=name), 400, "response_format")
    assert "wav, pcm" in error["message"]


def test_unsupported_stream_format(server: SpeechServer) -> None:
    error = server.assert_refused(server.speak(stream_format="websocket"), 400, "stream_format")
    assert "audio, sse" in error["message"]


def test_events_cannot_be_unstreamed(server: SpeechServer) -> None:
    server.assert_refused(server.speak(stream_format="sse", stream=False), 400, "stream")


@pytest.mark.parametrize("speed", [0.5, 2, 0, -1])
def test_other_speeds(server: SpeechServer, speed: float) -> None:
    server.assert_refused(server.speak(speed=speed), 400, "speed")


def test_a_model_that_is_not_served_is_404(server: SpeechServer) -> None:
    error = server.assert_refused(server.speak(model="tts-1"), 404, "model")
    assert error["code"] == "model_not_found"
    assert "tiny-tts" in error["message"]


WRONG_TYPES: list[tuple[str, Any]] = [
    ("input", 5),
    ("input", ["a"]),
    ("model", 1),
    ("instructions", {}),
    ("response_format", 1),
    ("speed", "1.0"),
    ("stream_format", False),
    ("stream", "yes"),
    ("stream", 1),
    ("language", ["english"]),
    ("text_mode", 0),
    ("seed", "7"),
    ("seed", 7.0),
    ("seed", True),
    ("temperature", "0.9"),
    ("temperature", False),
    ("top_k", 1.5),
    ("top_p", []),
    ("repetition_penalty", "x"),
    ("max_new_tokens", 2.5),
    ("include_codes", "true"),
]


@pytest.mark.parametrize(("field", "value"), WRONG_TYPES, ids=[f"{f}-{type(v).__name__}" for f, v in WRONG_TYPES])
def test_wrong_type(server: SpeechServer, field: str, value: Any) -> None:
    error = server.assert_refused(server.speak(**{field: value}), 400, field)
    assert error["code"] == "invalid_type"
    assert error["message"].startswith(f"{field} must be ")
    assert "another type" not in error["message"]


WRONG_VALUES: list[tuple[str, Any]] = [
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 10**400),
    ("temperature", -0.1),
    ("temperature", 1e30),
    ("temperature", 10**400),
    ("top_k", -1),
    ("top_k", 10**12),
    ("top_p", 0.0),
    ("top_p", -1.0),
    ("top_p", 1.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -2.0),
    ("repetition_penalty", 1e30),
    ("max_new_tokens", 0),
    ("max_new_tokens", -5),
    ("max_new_tokens", 10**9),
]


@pytest.mark.parametrize(
    ("field", "value"),
    WRONG_VALUES,
    ids=[f"{f}={v:.3g}" for f, v in WRONG_VALUES[:2]] + [f"{f}-{i}" for i, (f, _) in enumerate(WRONG_VALUES[2:])],
)
def test_value_out_of_range(server: SpeechServer, field: str, value: Any) -> None:
    server.assert_refused(server.speak(**{field: value}), 400, field)


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "seed"])
def test_numbers_that_are_not_finite(server: SpeechServer, field: str, token: str) -> None:
    response = server.send_raw(f'{{"input": "Hi.", "voice": "ryan", "{field}": {token}}}'.encode())
    server.assert_refused(response, 400, field)


def test_a_misspelt_field_is_refused_with_a_hint(server: SpeechServer) -> None:
    error = server.assert_refused(server.speak(temprature=0.1), 400, "temprature")
    assert "did you mean 'temperature'" in error["message"]


def test_an_unknown_field_is_refused_with_the_known_ones(server: SpeechServer) -> None:
    error = server.assert_refused(server.speak(zzz=1), 400, "zzz")
    assert "max_new_tokens" in error["message"]


def test_a_field_given_twice(server: SpeechServer) -> None:
    response = server.send_raw(b'{"input": "Hi.", "voice": "ryan", "seed": 1, "seed": 2}')
    error = server.assert_refused(response, 400, "seed")
    assert "more than once" in error["message"]


NOT_JSON = {
    "empty": b"",
    "blank": b"  \n ",
    "cut": b'{"input": "Hi."',
    "words": b"Hello there",
    "array": b'["input"]',
    "string": b'"input"',
    "null": b"null",
    "bom": b'\xef\xbb\xbf{"input": "Hi.", "voice": "ryan"}',
    "latin-1": '{"input": "Grüße", "voice": "ryan"}'.encode("latin-1"),
    "utf-16": '{"input": "Hi.", "voice": "ryan"}'.encode("utf-16"),
    "bare surrogate": b'{"input": "\xed\xa0\x80", "voice": "ryan"}',
    "deep": b"[" * 200_000,
    "deep objects": b'{"input":' * 20_000,
    "long integer": b'{"input": "Hi.", "voice": "ryan", "seed": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_a_body_that_is_not_a_json_object(server: SpeechServer, content: bytes) -> None:
    error = server.assert_refused(server.send_raw(content), 400, None)
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize("field", ["input", "instructions", "voice", "language"])
def test_an_escaped_unpaired_surrogate(server: SpeechServer, field: str) -> None:
    body = json.dumps({"input": "Hi.", "voice": "ryan"} | {field: "a\ud800b"})
    error = server.assert_refused(server.send_raw(body.encode("ascii")), 400, field)
    assert "surrogate" in error["message"]


def test_an_unknown_field_whose_name_is_no_text(server: SpeechServer) -> None:
    response = server.send_raw(b'{"input": "Hi.", "voice": "ryan", "\\ud800": 1}')
    server.assert_refused(response, 400, "\\ud800")


def test_a_megabyte_of_json(server: SpeechServer) -> None:
    response = server.speak(input="a" * 1_000_000)
    error = server.assert_refused(response, 413, None)
    assert error["code"] == "body_too_large"


def test_a_megabyte_without_a_content_length(server: SpeechServer) -> None:
    def parts() -> Iterator[bytes]:
        yield b'{"input": "'
        for _ in range(16):
            yield b"a" * 65_536
        yield b'"}'

    response = server.client.post("/v1/audio/speech", content=parts(), headers={"content-type": "application/json"})
    assert response.request.headers["transfer-encoding"] == "chunked"
    server.assert_refused(response, 413, None)


def test_a_body_announced_as_huge_is_refused_before_it_is_sent(server: SpeechServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100000000000\r\n\r\n"
        )
        answer = b""
        while part := connection.recv(65_536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer
    server.assert_speaks()


@pytest.mark.parametrize("length", ["262144", "262145"], ids=["at the limit", "one above"])
def test_the_size_limit_is_exact(server: SpeechServer, length: str) -> None:
    head, tail = b'{"voice": "ryan", "input": "Hi."', b"}"
    content = head + b" " * (int(length) - len(head) - len(tail)) + tail
    assert server.send_raw(content).status_code == (200 if length == "262144" else 413)
    server.assert_speaks()


@pytest.mark.parametrize(
    "headers",
    [
        {"content_type": "text/plain"},
        {"content_type": "application/x-www-form-urlencoded"},
        {"content_type": "multipart/form-data; boundary=x"},
        {"content_type": "application/json; charset=gbk"},
        {"content_encoding": "gzip"},
    ],
    ids=["text", "form", "multipart", "charset", "gzip"],
)
def test_a_body_that_is_not_json_by_its_own_account(server: SpeechServer, headers: dict[str, str]) -> None:
    content = b'{"input": "Hi.", "voice": "ryan"}'
    if "content_encoding" in headers:
        content = gzip.compress(content)
    server.assert_refused(server.send_raw(content, **headers), 415, None)


def test_no_room_says_when_to_try_again(server: SpeechServer) -> None:
    server.service.script = Script(submit_failure=CapacityError("all 128 streams are in use"))
    response = server.speak()
    assert int(response.headers["retry-after"]) >= 1
    error = server.assert_refused(response, 503, None)
    assert "128" in error["message"]


def test_a_prompt_that_does_not_fit(server: SpeechServer) -> None:
    server.service.script = Script(submit_failure=RequestError("input", "the prompt has 9000 rows, 8192 fit"))
    error = server.assert_refused(server.speak(), 400, "input")
    assert "9000" in error["message"]


def test_something_this_server_cannot_do(server: SpeechServer) -> None:
    server.service.script = Script(submit_failure=UnsupportedError("voice cloning is not available"))
    error = server.assert_refused(server.speak(), 400, None)
    assert error["code"] == "unsupported"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "unstreamed"])
def test_a_failure_before_the_first_chunk_has_its_status(server: SpeechServer, stream: bool) -> None:
    server.service.script = Script(fail_at=0, failure=GenerationError("the engine died"))
    error = server.assert_refused(server.speak(stream=stream), 500, None)
    assert error["code"] == "generation_failed"


def test_a_failure_after_the_first_chunk_of_an_unstreamed_answer(server: SpeechServer) -> None:
    server.service.script = Script(fail_at=2, failure=GenerationError("the engine died"))
    server.assert_refused(server.speak(stream=False), 500, None)


def test_a_defect_is_answered_without_its_text(server: SpeechServer, caplog: pytest.LogCaptureFixture) -> None:
    server.service.script = Script(fail_at=0, failure=KeyError("secret"))
    error = server.assert_refused(server.speak(), 500, None)
    assert "secret" not in error["message"]
    assert "secret" in caplog.text
    assert "Traceback" in caplog.text
