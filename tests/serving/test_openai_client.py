"""OpenAI's own client, unchanged, against the routes."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from pathlib import Path

import openai
import pytest
import soundfile

from qwen3tts_hw.errors import CapacityError
from qwen3tts_hw.serving.wav import fix_sizes, wav_header
from tests.serving.fake_service import Script, saw_tooth
from tests.serving.speech_server import MODEL, SpeechServer


@pytest.fixture
def client(server: SpeechServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_create_returns_the_file(server: SpeechServer, client: openai.OpenAI, tmp_path: Path) -> None:
    with client:
        response = client.audio.speech.create(
            model=MODEL, voice="ryan", input="Hello.", response_format="wav", extra_body={"stream": False, "seed": 3}
        )
        path = tmp_path / "speech.wav"
        response.write_to_file(path)
    with wave.open(str(path)) as reader:
        assert reader.readframes(reader.getnframes()) == saw_tooth(0, 7)
    assert soundfile.info(path).frames == 7 * 1_920
    assert server.service.streams[0].request.sampling.seed == 3


def test_streaming_pcm_arrives_in_chunks(server: SpeechServer, client: openai.OpenAI) -> None:
    server.service.script = Script(chunks=(1, 1, 1), delay_s=0.05)
    with (
        client,
        client.audio.speech.with_streaming_response.create(
            model=MODEL, voice="ryan", input="Hello.", response_format="pcm"
        ) as response,
    ):
        parts = list(response.iter_bytes())
    assert len(parts) >= 2
    assert b"".join(parts) == saw_tooth(0, 3)


def test_streaming_wav_is_readable_once_its_sizes_are_fixed(server: SpeechServer, client: openai.OpenAI) -> None:
    with client:
        response = client.audio.speech.create(model=MODEL, voice="ryan", input="Hello.", response_format="wav")
    samples, _ = soundfile.read(io.BytesIO(fix_sizes(response.content)), dtype="int16")
    assert samples.tobytes() == saw_tooth(0, 7)


def test_the_default_format_is_wav(server: SpeechServer, client: openai.OpenAI) -> None:
    with client:
        response = client.audio.speech.create(model=MODEL, voice="ryan", input="Hello.")
    assert response.content == wav_header() + saw_tooth(0, 7)


def test_events_can_be_read_from_the_raw_response(server: SpeechServer, client: openai.OpenAI) -> None:
    with (
        client,
        client.audio.speech.with_streaming_response.create(
            model=MODEL, voice="ryan", input="Hello.", response_format="pcm", stream_format="sse"
        ) as response,
    ):
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    audio = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert audio == saw_tooth(0, 7)
    assert events[-1]["finish_reason"] == "stop"


def test_the_asynchronous_client_can_leave(server: SpeechServer) -> None:
    server.service.script = Script(chunks=(1,), endless=True, delay_s=0.001)

    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            request = client.audio.speech.with_streaming_response.create(model=MODEL, voice="ryan", input="Hello.")
            async with request as response:
                async for _ in response.iter_bytes():
                    break

    asyncio.run(scenario())
    server.wait_all_closed()


def test_errors_become_the_client_s_exceptions(server: SpeechServer, client: openai.OpenAI) -> None:
    with client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.audio.speech.create(model=MODEL, voice="alloy", input="Hello.", response_format="wav")
        assert refused.value.param == "voice"
        assert "ryan" in refused.value.message
        with pytest.raises(openai.NotFoundError) as unknown:
            client.audio.speech.create(model="tts-1", voice="ryan", input="Hello.", response_format="wav")
        assert unknown.value.code == "model_not_found"
        server.service.script = Script(submit_failure=CapacityError("full"))
        with pytest.raises(openai.InternalServerError):
            client.audio.speech.create(model=MODEL, voice="ryan", input="Hello.", response_format="wav")
