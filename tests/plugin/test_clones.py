"""Cloned voices on real vLLM: what the official package says with them, alone and in company, and what they cost.

References travel over HTTP as WAV files; the samples lie on the 16-bit grid, so the encoders hear what the official
ones heard.
"""

from __future__ import annotations

import base64
import io
import time
import wave
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qwen3tts_hw.types import SAMPLE_RATE_HZ
from tests.parity.checkpoints import TinyCheckpoint
from tests.parity.reference_audio import FULL_SCALE, reference_audio
from tests.parity.voice_golden import CloneFile, clone_files
from tests.plugin.answers import Speech, assert_equal_codes
from tests.plugin.reference import TOLERANCE, assert_close_samples
from tests.plugin.server import SpeechServer, wait_for
from tests.plugin.test_bad_requests import assert_refused
from tests.plugin.test_batching import speak_at_once
from tests.plugin.test_golden import hidden_states

pytestmark = pytest.mark.vllm

SERVER_OF = {"base-tiny": "clones", "base-tiny-0.6B": "small_clones"}
WIDTH = 64
# Of the eight voices at once: no two candidates of any code are within 9e-5 of each other, so that rounding, which
# depends on the batch, cannot decide between them (with seed 7, frame 20 has two that differ by 5e-7).
FIRST_SEED = 40
PLAIN = {"voice": None, "language": "auto"}
VOICES = "/v1/audio/voices"
Answer = Callable[[SpeechServer, CloneFile], tuple[Speech, NDArray[np.float32]]]


def wav(samples: NDArray[np.float32]) -> bytes:
    """Samples on the 16-bit grid as a file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE_HZ)
        out.writeframes((samples * FULL_SCALE).astype("<i2").tobytes())
    return file.getvalue()


def data_url(samples: NDArray[np.float32]) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(wav(samples)).decode()}"


def by_server() -> list[object]:
    """Return all cases with their server, those of one checkpoint together."""
    ordered = sorted(clone_files(), key=lambda clone: clone.checkpoint.key)
    return [
        pytest.param(clone, id=clone.id, marks=pytest.mark.server(SERVER_OF[clone.checkpoint.name]))
        for clone in ordered
    ]


@pytest.fixture(scope="module")
def answer(checkpoint: Callable[[TinyCheckpoint], Path]) -> Answer:
    """Return a function to the server's answer and hidden states, asked for once."""
    kept: dict[str, tuple[Speech, NDArray[np.float32]]] = {}

    def ask(server: SpeechServer, clone: CloneFile) -> tuple[Speech, NDArray[np.float32]]:
        if clone.id not in kept:
            server.load(checkpoint(clone.checkpoint))
            asked = clone.request
            speech = server.speak(
                asked["text"],
                voice=None,
                language=asked["language"],
                ref_audio=data_url(clone.audio()),
                ref_text=asked["ref_text"],
                x_vector_only_mode=asked["x_vector_only"],
                text_mode=asked["text_mode"],
                max_new_tokens=asked["max_frames"],
            )
            kept[clone.id] = speech, hidden_states(server, speech.request_id)
        return kept[clone.id]

    return ask


@pytest.mark.parametrize("clone", by_server())
class TestServedClones:
    def test_codes_are_identical(self, clone: CloneFile, server: SpeechServer, answer: Answer) -> None:
        assert_equal_codes(answer(server, clone)[0].codes, clone.arrays["codes"], clone.id)

    def test_finish_reason_is_equal(self, clone: CloneFile, server: SpeechServer, answer: Answer) -> None:
        assert answer(server, clone)[0].finish_reason == clone.finish_reason

    def test_waveform_agrees(self, clone: CloneFile, server: SpeechServer, answer: Answer) -> None:
        assert_close_samples(answer(server, clone)[0], clone.arrays["waveform"])

    def test_hidden_states_agree(self, clone: CloneFile, server: SpeechServer, answer: Answer) -> None:
        expected = clone.arrays["hidden"]
        found = answer(server, clone)[1].reshape(-1, expected.shape[1])[: len(expected)]
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= TOLERANCE


def eight_clones(frames: int) -> list[dict[str, Any]]:
    """Return eight requests in eight voices: references of several lengths, and sounds alone."""
    requests: list[dict[str, Any]] = []
    for index in range(8):
        fields = PLAIN | {
            "text": f"The voice of number {index} says this.",
            "ref_audio": data_url(reference_audio(6_000 + 4_000 * index, seed=FIRST_SEED + index)),
            "text_mode": "whole" if index % 2 else "streaming",
            "max_new_tokens": frames,
        }
        fields |= {"x_vector_only_mode": True} if index % 4 == 3 else {"ref_text": "Good morning."}
        requests.append(fields)
    return requests


@pytest.mark.server("clones")
def test_eight_clones_at_once_are_as_alone_though_preempted(server: SpeechServer) -> None:
    requests = eight_clones(frames=60)
    alone = [server.speak(**fields) for fields in requests]
    assert len({answer.codes.tobytes() for answer in alone}) == len(requests), "voices must matter"
    before = server.wait_until_idle()["workers"][0]["preempted"]
    together = speak_at_once(server, requests)
    for number, (found, expected) in enumerate(zip(together, alone, strict=True)):
        assert_equal_codes(found.codes, expected.codes, f"voice {number}")
        assert_close_samples(found, expected.pcm / 32_767)
    assert server.wait_until_idle()["workers"][0]["preempted"] > before


@pytest.mark.server("clones")
class TestRegisteredVoices:
    def register(self, server: SpeechServer, name: str, seed: int, **fields: str) -> None:
        sent = {"name": name, "consent": "true", "ref_text": "Good morning."} | fields
        audio = {"audio": ("a.wav", wav(reference_audio(24_000, seed)))}
        response = server.client.post(VOICES, data=sent, files=audio)
        assert response.status_code == 201, response.text

    def test_one_speaks_as_its_recording_does_and_costs_no_encoding(self, server: SpeechServer) -> None:
        self.register(server, "anna", seed=50)
        encoded = server.worker()["voices_encoded"]
        fields = PLAIN | {"text": "Hello there.", "max_new_tokens": 6}
        by_name = [server.speak(**fields | {"voice": "anna"}) for _ in range(2)]
        assert server.worker()["voices_encoded"] == encoded
        given = {"ref_audio": data_url(reference_audio(24_000, 50)), "ref_text": "Good morning."}
        by_audio = [server.speak(**fields | given) for _ in range(2)]
        assert server.worker()["voices_encoded"] == encoded, "the recording is known already"
        for speech in (*by_name, *by_audio):
            assert_equal_codes(speech.codes, by_name[0].codes)
        assert server.client.delete(f"{VOICES}/anna").status_code == 200
        assert_refused(server.client.post("/v1/audio/speech", json={"input": "Hi.", "voice": "anna"}), 400, "voice")

    def test_the_codec_hears_its_reference_once(self, server: SpeechServer) -> None:
        self.register(server, "emil", seed=53)
        before = server.worker()["references"]
        fields = PLAIN | {"text": "Hello there.", "voice": "emil", "max_new_tokens": 6}
        said = [server.speak(**fields) for _ in range(3)]
        after = server.worker()["references"]
        assert {name: after[name] - before[name] for name in ("primed", "restored")} == {"primed": 1, "restored": 2}
        assert all(np.array_equal(speech.pcm, said[0].pcm) for speech in said)
        other = np.roll(reference_audio(24_000, 53), 500)
        server.speak(**fields | {"voice": None, "ref_audio": data_url(other), "ref_text": "Good morning."})
        assert server.worker()["references"]["primed"] == after["primed"] + 1
        assert server.client.delete(f"{VOICES}/emil").status_code == 200

    def test_a_recording_is_encoded_once(self, server: SpeechServer) -> None:
        before = server.worker()["voices_encoded"]
        fields = PLAIN | {"text": "Hello there.", "max_new_tokens": 3, "ref_text": "Good morning."}
        audio = data_url(reference_audio(12_000, seed=60))
        speak_at_once(server, [fields | {"ref_audio": audio, "seed": number} for number in range(6)])
        server.speak(**fields | {"ref_audio": audio})
        assert server.worker()["voices_encoded"] == before + 1

    def test_deleting_one_that_speaks(self, server: SpeechServer) -> None:
        self.register(server, "berta", seed=51)
        fields = PLAIN | {"text": "Hello there.", "voice": "berta", "max_new_tokens": 40}
        with server.client.stream(
            "POST",
            "/v1/audio/speech",
            json={"input": fields["text"], "voice": "berta", "max_new_tokens": 40, "response_format": "pcm"},
        ) as response:
            assert server.client.delete(f"{VOICES}/berta").status_code == 200
            assert len(response.read()) == 40 * 1_920 * 2

    def test_it_survives_export_and_import(self, server: SpeechServer) -> None:
        self.register(server, "carla", seed=52)
        fields = PLAIN | {"text": "Hello there.", "max_new_tokens": 4}
        before = server.speak(**fields | {"voice": "carla"})
        data = server.client.get(f"{VOICES}/carla/export").content
        assert server.client.delete(f"{VOICES}/carla").status_code == 200
        assert server.client.post(f"{VOICES}/import?name=doris", content=data).status_code == 201
        assert_equal_codes(server.speak(**fields | {"voice": "doris"}).codes, before.codes)
        assert server.client.delete(f"{VOICES}/doris").status_code == 200


@pytest.mark.server("clones")
def test_frames_come_while_a_recording_is_encoded(server: SpeechServer) -> None:
    """The worker counts steps and answers questions between the start of an encoding and its end."""
    steps = []
    with ThreadPoolExecutor(2) as others:
        speech = others.submit(server.speak, **PLAIN | {"speaker_embedding": [0.1] * WIDTH, "max_new_tokens": 220})
        wait_for(lambda: server.worker()["streams_open"], seconds=30.0, message="no stream is open")
        sent = {"name": "fanny", "consent": "true", "ref_text": "Good morning."}
        audio = {"audio": ("a.wav", wav(reference_audio(24_000 * 55, seed=80)))}
        registered = others.submit(server.client.post, VOICES, data=sent, files=audio)
        while not registered.done():
            worker = server.worker()
            if worker["voices_open"]:
                steps.append(worker["steps"])
        assert registered.result().status_code == 201, registered.result().text
        assert len(speech.result().codes) == 220
    assert len(steps) >= 2 and steps[-1] - steps[0] >= 2, steps
    assert server.client.delete(f"{VOICES}/fanny").status_code == 200


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "no voice": ("voice", {}),
    "a preset": ("voice", {"voice": "ryan"}),
    "no reference text": ("ref_text", {"ref_audio": data_url(reference_audio(6_000))}),
    "not audio": ("ref_audio", {"ref_audio": "data:audio/wav;base64,AAAA", "ref_text": "Hi."}),
    "too short for the encoder": (
        "ref_audio",
        {"ref_audio": data_url(reference_audio(300)), "x_vector_only_mode": True},
    ),
    "a file": ("ref_audio", {"ref_audio": "file:///etc/hostname", "ref_text": "Hi."}),
    "a private address": ("ref_audio", {"ref_audio": "http://127.0.0.1:1/a.wav", "ref_text": "Hi."}),
    "another width": ("speaker_embedding", {"speaker_embedding": [0.1] * (WIDTH + 1)}),
    "a prompt that does not fit": (
        "input",
        {"ref_audio": data_url(reference_audio(24_000 * 21)), "ref_text": "Good morning."},
    ),
}


@pytest.mark.server("clones")
@pytest.mark.parametrize(("param", "given"), BAD.values(), ids=BAD)
def test_bad_voices(server: SpeechServer, param: str, given: dict[str, Any]) -> None:
    response = server.client.post("/v1/audio/speech", json={"input": "Hi."} | given)
    assert_refused(response, 400, param)
    good = {"speaker_embedding": [0.1] * WIDTH, "max_new_tokens": 3}
    assert len(server.speak(**PLAIN | good).codes) == 3


@pytest.mark.server("standard")
def test_a_checkpoint_of_presets_names_the_right_one(server: SpeechServer) -> None:
    body = {"input": "Hi.", "voice": "ryan", "ref_audio": data_url(reference_audio(6_000)), "ref_text": "Hi."}
    error = assert_refused(server.client.post("/v1/audio/speech", json=body), 400, "ref_audio")
    assert "1.7B-Base" in error["message"]
    assert len(server.speak(max_new_tokens=3).codes) == 3


@pytest.mark.server("clones")
def test_first_audio_of_voices(server: SpeechServer, figure: Callable[[str], None]) -> None:
    """No limits here, only figures: the time to the first audio of an embedding, a known and a new recording."""
    seconds = {}
    known = {"ref_audio": data_url(reference_audio(72_000, seed=70)), "ref_text": "Good morning."}
    server.speak(**PLAIN | known | {"max_new_tokens": 2})
    for name, given in {
        "embedding": {"speaker_embedding": [0.1] * WIDTH},
        "known recording of 3 s": known,
        "new recording of 3 s": known | {"ref_audio": data_url(reference_audio(72_000, seed=71))},
    }.items():
        started = time.monotonic()
        server.speak_some(1, **PLAIN | given | {"max_new_tokens": 2})
        seconds[name] = time.monotonic() - started
    figure("first audio: " + ", ".join(f"{name} {took * 1e3:.0f} ms" for name, took in seconds.items()))
    assert all(took > 0 for took in seconds.values())
