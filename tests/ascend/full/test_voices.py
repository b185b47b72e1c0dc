"""Cloned voices on the emulated device under vLLM and vllm-ascend: registered, spoken with, encoded beside a stream."""

from __future__ import annotations

import base64
import io
import wave
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("vllm_ascend", reason="runs in the full bed: make test-ascend")

from tests.ascend.full.server import Server
from tests.ascend.full.test_serve import ALLOWED
from tests.parity.reference_audio import FULL_SCALE, reference_audio

VOICES = "/v1/audio/voices"
FRAMES = 12


@pytest.fixture(scope="module")
def server(tiny_checkpoint, tmp_path_factory):
    checkpoint = tiny_checkpoint("base", "tiny-heads128", end_of_speech=False)
    folder = str(tmp_path_factory.mktemp("voices"))
    with Server(checkpoint, "FULL_DECODE_ONLY", "float32", QWEN3TTS_VOICES_DIR=folder, **ALLOWED["float32"]) as running:
        yield running


def wav(seconds, seed):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(24_000)
        out.writeframes((reference_audio(int(24_000 * seconds), seed) * FULL_SCALE).astype("<i2").tobytes())
    return file.getvalue()


def register(server, name, seconds, seed):
    sent = {"name": name, "consent": "true", "ref_text": "Good morning."}
    audio = {"audio": ("a.wav", wav(seconds, seed))}
    answer = server.client.post(VOICES, data=sent, files=audio)
    assert answer.status_code == 201, answer.text


def speak(server, **voice):
    body = {"input": "Hello there.", "temperature": 0, "max_new_tokens": FRAMES, "response_format": "pcm"} | voice
    answer = server.client.post("/v1/audio/speech", json=body)
    assert answer.status_code == 200, answer.text
    return answer.content


def test_a_kept_state_says_what_a_primed_one_says(server):
    register(server, "anna", 1.3, seed=50)
    before = server.worker()["references"]
    said = [speak(server, voice="anna") for _ in range(3)]
    after = server.worker()["references"]
    assert {name: after[name] - before[name] for name in ("primed", "restored")} == {"primed": 1, "restored": 2}
    assert len(said[0]) == FRAMES * 2 * 1920 and np.frombuffer(said[0], np.int16).std() > 100
    assert said[0] == said[1] == said[2]
    given = base64.b64encode(wav(1.3, 50)).decode()
    assert speak(server, ref_audio=given, ref_text="Good morning.") == said[0]


def test_steps_go_on_while_a_recording_is_encoded(server):
    steps = []
    with ThreadPoolExecutor(2) as others:
        speech = others.submit(speak, server, speaker_embedding=[0.1] * 64, max_new_tokens=300)
        registered = others.submit(register, server, "berta", 30, 51)
        while not registered.done():
            worker = server.worker()
            if worker["voices_open"] and worker["streams_open"]:
                steps.append(worker["steps"])
        registered.result()
        assert len(speech.result()) == 300 * 2 * 1920
    assert len(steps) >= 2 and steps[-1] > steps[0], steps
    assert not [name for name in server.device_counts() if name.startswith("refused")]
