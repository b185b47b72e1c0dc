"""Good requests: what is sent, in which shape, with which headers, and what the engine is asked for."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import httpx
import pytest
import soundfile

from qwen3tts_hw.errors import GenerationError
from qwen3tts_hw.serving.wav import fix_sizes, wav_header
from qwen3tts_hw.types import FinishReason
from tests.serving.fake_service import PROMPT_ROWS, Script, frame_codes, model_config, saw_tooth
from tests.serving.speech_server import SpeechServer


def events_of(text: str) -> list[dict[str, Any]]:
    """Parse a stream of data-only server-sent events."""
    blocks = text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def test_a_streamed_wav_is_a_header_of_unknown_length_and_all_chunks(server: SpeechServer) -> None:
    response = server.speak()
    assert response.status_code == 200
    assert response.headers["content-type"] == "audio/wav"
    assert response.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in response.headers
    assert response.content == wav_header() + saw_tooth(0, 7)
    samples, rate = soundfile.read(io.BytesIO(fix_sizes(response.content)), dtype="int16")
    assert (rate, len(samples)) == (24_000, 7 * 1_920)


def test_streamed_pcm_is_the_samples_alone(server: SpeechServer) -> None:
    response = server.speak(response_format="pcm")
    assert response.headers["content-type"] == "audio/pcm"
    assert response.content == saw_tooth(0, 7)


def test_headers_tell_request_seed_and_sample_rate(server: SpeechServer) -> None:
    response = server.speak(seed=123)
    assert response.headers["x-request-id"] == "speech-0"
    assert response.headers["x-seed"] == "123"
    assert response.headers["x-sample-rate"] == "24000"


def test_a_random_seed_is_told_and_is_the_one_used(server: SpeechServer) -> None:
    told = int(server.speak(seed=None).headers["x-seed"])
    assert server.service.streams[0].request.sampling.seed == told


def test_an_unstreamed_wav_has_exact_sizes_and_the_outcome_in_headers(server: SpeechServer) -> None:
    server.service.script = Script(finish_reason=FinishReason.LENGTH)
    response = server.speak(stream=False)
    pcm = saw_tooth(0, 7)
    assert response.content == wav_header(len(pcm)) + pcm
    assert response.headers["content-length"] == str(44 + len(pcm))
    assert response.headers["x-finish-reason"] == "length"
    assert response.headers["x-frames"] == "7"


def test_unstreamed_pcm_has_a_length(server: SpeechServer) -> None:
    response = server.speak(stream=False, response_format="pcm")
    assert response.content == saw_tooth(0, 7)
    assert response.headers["content-length"] == str(len(response.content))


def test_an_empty_last_chunk_ends_the_audio(server: SpeechServer) -> None:
    server.service.script = Script(chunks=(2, 0))
    assert server.speak(response_format="pcm").content == saw_tooth(0, 2)


def test_events_carry_the_file_and_end_with_the_outcome(server: SpeechServer) -> None:
    response = server.speak(stream_format="sse", include_codes=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, done = events_of(response.text)
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(event["audio"]) for event in deltas) == wav_header() + saw_tooth(0, 7)
    assert done == {
        "type": "speech.audio.done",
        "id": "speech-0",
        "finish_reason": "stop",
        "frames": 7,
        "audio_seconds": 0.56,
        "prompt_rows": PROMPT_ROWS,
        "seed": 7,
        "codes": frame_codes(7),
        "usage": {"input_tokens": PROMPT_ROWS, "output_tokens": 7, "total_tokens": PROMPT_ROWS + 7},
    }


def test_events_of_pcm_have_no_header_and_no_codes_unless_asked(server: SpeechServer) -> None:
    *deltas, done = events_of(server.speak(stream_format="sse", response_format="pcm").text)
    assert b"".join(base64.b64decode(event["audio"]) for event in deltas) == saw_tooth(0, 7)
    assert "codes" not in done


def test_the_outcome_is_told_afterwards(server: SpeechServer) -> None:
    request_id = server.speak(include_codes=True).headers["x-request-id"]
    assert server.client.get(f"/v1/audio/speech/{request_id}").json() == {
        "id": request_id,
        "finish_reason": "stop",
        "frames": 7,
        "audio_seconds": 0.56,
        "prompt_rows": PROMPT_ROWS,
        "seed": 7,
        "codes": frame_codes(7),
    }


def test_the_outcome_of_an_unknown_request_is_404(server: SpeechServer) -> None:
    error = server.assert_refused(server.client.get("/v1/audio/speech/nobody"), 404, "request_id")
    assert "nobody" in error["message"]


def test_every_field_reaches_the_engine(server: SpeechServer) -> None:
    response = server.speak(
        voice={"id": "Ryan"},
        language="English",
        instructions="Whisper.",
        text_mode="streaming",
        temperature=0.5,
        top_k=7,
        top_p=0.8,
        repetition_penalty=1.2,
        max_new_tokens=33,
        seed=99,
        speed=1.0,
    )
    assert response.status_code == 200, response.text
    request = server.service.streams[0].request
    assert (request.text, request.voice, request.language) == ("Hello there.", "ryan", "english")
    assert (request.instruct, request.text_mode, request.max_frames) == ("Whisper.", "streaming", 33)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.8)
    assert (sampling.repetition_penalty, sampling.seed) == (1.2, 99)


def test_null_is_the_same_as_left_out(server: SpeechServer) -> None:
    body = {"input": "Hi.", "voice": "ryan", "model": None, "temperature": None, "stream": None, "speed": None}
    assert server.send_raw(json.dumps(body).encode()).status_code == 200


def test_a_body_without_a_content_type_is_taken_for_json(server: SpeechServer) -> None:
    response = server.client.post("/v1/audio/speech", content=b'{"input": "Hi.", "voice": "ryan"}')
    assert "content-type" not in response.request.headers
    assert response.status_code == 200


@pytest.mark.parametrize("voice", ["design", "Default", "", None])
def test_a_voice_design_checkpoint_takes_the_words_for_no_voice(design_server: SpeechServer, voice: str | None) -> None:
    response = design_server.speak(voice=voice, instructions="An old man.")
    assert response.status_code == 200, response.text
    assert design_server.service.streams[0].request.voice is None


def test_a_failure_after_the_first_chunk_cuts_the_audio_off(server: SpeechServer) -> None:
    server.service.script = Script(fail_at=1, failure=GenerationError("the engine died"))
    with pytest.raises(httpx.RemoteProtocolError):
        server.speak()
    server.assert_speaks()


def test_a_stream_without_its_last_chunk_is_cut_off(server: SpeechServer) -> None:
    server.service.script = Script(truncate=True)
    with pytest.raises(httpx.RemoteProtocolError):
        server.speak()


def test_an_aborted_request_is_not_taken_for_complete(server: SpeechServer) -> None:
    server.service.script = Script(finish_reason=FinishReason.ABORT)
    with pytest.raises(httpx.RemoteProtocolError):
        server.speak()
    assert server.speak(stream=False).status_code == 500


def test_a_failure_in_an_event_stream_is_an_error_event(server: SpeechServer) -> None:
    server.service.script = Script(fail_at=2, failure=GenerationError("the engine died"))
    *deltas, failed = events_of(server.speak(stream_format="sse", response_format="pcm").text)
    assert len(deltas) == 2
    assert failed["error"]["code"] == "generation_failed"
    assert "the engine died" in failed["error"]["message"]


def test_voices_of_a_custom_voice_checkpoint(server: SpeechServer) -> None:
    assert server.client.get("/v1/audio/voices").json() == {
        "voices": [
            {"id": "ryan", "name": "Ryan"},
            {"id": "uncle_fu", "name": "Uncle_Fu", "dialect": "sichuan_dialect"},
        ],
        "languages": ["auto", "chinese", "english"],
        "variant": "custom_voice",
        "text_modes": ["whole", "streaming"],
        "accepts_instructions": True,
        "sample_rate": 24_000,
    }


def test_voices_of_a_small_checkpoint_say_that_it_takes_no_instructions(server: SpeechServer) -> None:
    server.service.config = model_config(size_name="0b6")
    assert server.client.get("/v1/audio/voices").json()["accepts_instructions"] is False


def test_stats_are_the_service_s(server: SpeechServer) -> None:
    server.speak()
    assert server.client.get("/v1/audio/stats").json() == {"requests": 1}


def test_health_tells_the_code_paths(server: SpeechServer) -> None:
    response = server.client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "device": "fake", "graphs": "off"})


def test_health_is_503_when_the_engine_is_dead(server: SpeechServer) -> None:
    server.service.health_failure = RuntimeError("engine core died")
    response = server.client.get("/health")
    assert response.status_code == 503
    assert response.json()["status"] == "unhealthy"
    assert "engine core died" in response.json()["error"]["message"]
