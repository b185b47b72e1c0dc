"""Speech requests in cloned voices: which fields make which voice, what is refused, and what is encoded how often."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import SAMPLES_PER_FRAME, ClonedVoice
from tests.serving.recordings import bad_recordings, data_url, odd_recordings, recording
from tests.serving.speech_server import SpeechServer

WIDTH = 64
GOOD = {"ref_audio": data_url(recording()), "ref_text": "Good morning."}
BAD, ODD = bad_recordings(), odd_recordings()


def clone(server: SpeechServer, **fields):
    return server.speak(voice=None, **fields)


def voice_of(server: SpeechServer, **fields) -> ClonedVoice:
    """The voice that reached the service."""
    response = clone(server, **fields)
    assert response.status_code == 200, response.text
    voice = server.service.streams[-1].request.voice
    assert isinstance(voice, ClonedVoice)
    return voice


class TestVoices:
    def test_reference_audio_with_its_text(self, base_server):
        voice = voice_of(base_server, **GOOD)
        assert (voice.reference_text, voice.reference_frames) == ("Good morning.", -(-12_000 // SAMPLES_PER_FRAME))
        assert len(voice.embedding) == 4 * WIDTH
        assert base_server.service.encoded == [(12_000, True)]

    @pytest.mark.parametrize("text", [None, "Good morning."])
    def test_the_sound_alone(self, base_server, text):
        voice = voice_of(base_server, **GOOD | {"x_vector_only_mode": True, "ref_text": text})
        assert (voice.reference_text, voice.reference_codes) == ("", b"")
        assert base_server.service.encoded == [(12_000, False)]

    def test_an_embedding(self, base_server):
        values = np.linspace(-2, 2, WIDTH).tolist()
        voice = voice_of(base_server, speaker_embedding=[*values[:-1], 2])
        assert np.frombuffer(voice.embedding, "<f4") == pytest.approx(values)
        assert base_server.service.encoded == []

    def test_base64_without_a_header(self, base_server):
        assert voice_of(base_server, **GOOD | {"ref_audio": GOOD["ref_audio"].partition(",")[2]})

    @pytest.mark.parametrize("name", ["default", "", "design"])
    def test_names_of_clients_that_must_name_a_voice(self, base_server, name):
        assert base_server.speak(voice=name, **GOOD).status_code == 200

    def test_text_streams_by_default(self, base_server):
        voice_of(base_server, **GOOD)
        assert base_server.service.streams[-1].request.text_mode == "streaming"

    @pytest.mark.parametrize("name", ODD)
    def test_unusual_recordings(self, base_server, name):
        assert voice_of(base_server, **GOOD | {"ref_audio": data_url(ODD[name])})

    def test_clean_up_is_asked_for_by_fields(self, base_server):
        voice_of(base_server, **GOOD, trailing_silence_ms=500, trim_silence=True, normalize_loudness=True)
        assert base_server.service.encoded == [(24_000, True)]

    def test_clean_up_is_asked_for_by_settings(self, base_server, tmp_path):
        base_server.service.settings = Settings(voices_dir=str(tmp_path), ref_audio_trailing_silence_ms=250)
        voice_of(base_server, **GOOD)
        voice_of(base_server, **GOOD, trailing_silence_ms=0)
        assert base_server.service.encoded == [(18_000, True), (12_000, True)]

    def test_audio_may_be_larger_than_other_bodies(self, base_server):
        large = recording(24_000 * 15)
        assert len(large) > base_server.service.settings.max_body_bytes
        assert voice_of(base_server, **GOOD | {"ref_audio": data_url(large)})

    def test_the_text_limit_stays(self, base_server):
        base_server.assert_refused(clone(base_server, **GOOD, input="word " * 5_000), 400, "input")


class TestEncodingOnce:
    def test_the_same_reference_again(self, base_server):
        for _ in range(3):
            voice_of(base_server, **GOOD)
        assert len(base_server.service.encoded) == 1

    def test_many_at_once(self, base_server):
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: clone(base_server, **GOOD), range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        assert len(base_server.service.encoded) == 1
        assert len({stream.request.voice for stream in base_server.service.streams}) == 1

    def test_other_options_are_other_voices(self, base_server):
        voice_of(base_server, **GOOD)
        voice_of(base_server, **GOOD, x_vector_only_mode=True)
        voice_of(base_server, **GOOD, trailing_silence_ms=100)
        voice_of(base_server, **GOOD | {"ref_text": "Another text."})
        assert base_server.service.encoded == [(12_000, True), (12_000, False), (14_400, True)]

    def test_a_failure_is_not_kept(self, base_server):
        for _ in range(2):
            response = clone(base_server, **GOOD | {"ref_audio": data_url(BAD["silence"])})
            base_server.assert_refused(response, 400, "ref_audio")


class TestRefusals:
    @pytest.mark.parametrize("name", BAD)
    def test_bad_recordings(self, base_server, name):
        response = clone(base_server, **GOOD | {"ref_audio": data_url(BAD[name])})
        base_server.assert_refused(response, 400, "ref_audio")
        assert base_server.service.encoded == []

    @pytest.mark.parametrize(
        "address",
        [
            "file:///etc/passwd",
            "http://127.0.0.1/a.wav",
            "http://169.254.169.254/latest/meta-data",
            "https://[::1]/a.wav",
            "http://example.com/../a.wav",
            "ftp://example.com/a.wav",
            "http://allowed.example@127.0.0.1/a.wav",
        ],
    )
    def test_addresses(self, base_server, address):
        base_server.assert_refused(clone(base_server, **GOOD | {"ref_audio": address}), 400, "ref_audio")

    @pytest.mark.parametrize(
        ("param", "fields"),
        [
            ("ref_text", {"ref_audio": GOOD["ref_audio"]}),
            ("ref_text", GOOD | {"ref_text": " "}),
            ("ref_text", GOOD | {"ref_text": "word " * 5_000}),
            ("ref_text", GOOD | {"ref_text": 3}),
            ("ref_text", {"ref_text": "Good morning."}),
            ("ref_audio", GOOD | {"ref_audio": ""}),
            ("ref_audio", GOOD | {"ref_audio": "data:audio/wav;base64,@@@@"}),
            ("ref_audio", GOOD | {"ref_audio": 3}),
            ("ref_audio", GOOD | {"ref_audio": data_url(recording(), "text/html")}),
            ("ref_audio", GOOD | {"speaker_embedding": [0.5] * WIDTH}),
            ("ref_audio", GOOD | {"voice": "somebody"}),
            ("speaker_embedding", {"speaker_embedding": []}),
            ("speaker_embedding", {"speaker_embedding": [0.5] * (WIDTH - 1)}),
            ("speaker_embedding", {"speaker_embedding": [[0.5] * WIDTH]}),
            ("speaker_embedding", {"speaker_embedding": ["a"] * WIDTH}),
            ("speaker_embedding", {"speaker_embedding": "0.5"}),
            ("speaker_embedding", {"speaker_embedding": [1e30] * WIDTH}),
            ("speaker_embedding", {"speaker_embedding": [10**400] * WIDTH}),
            ("x_vector_only_mode", GOOD | {"x_vector_only_mode": "yes"}),
            ("trailing_silence_ms", GOOD | {"trailing_silence_ms": 10**6}),
            ("trailing_silence_ms", GOOD | {"trailing_silence_ms": -1}),
            ("trim_silence", GOOD | {"trim_silence": 1}),
            ("voice", {}),
            ("voice", {"voice": "nobody"}),
            ("voice", {"voice": "../../etc/passwd"}),
            ("instructions", GOOD | {"instructions": "Whisper."}),
        ],
    )
    def test_fields(self, base_server, param, fields):
        base_server.assert_refused(base_server.speak(**{"voice": None} | fields), 400, param)

    @pytest.mark.parametrize("field", ["ref_audio", "ref_text", "x_vector_only_mode", "speaker_embedding"])
    def test_other_checkpoints_name_the_right_one(self, server, design_server, field):
        value = {"ref_audio": GOOD["ref_audio"], "ref_text": "a", "x_vector_only_mode": True}.get(field, [0.5])
        for refusing in (server, design_server):
            error = refusing.assert_refused(refusing.speak(**{field: value}), 400, field)
            assert "1.7B-Base" in error["message"]

    def test_other_checkpoints_keep_their_body_limit(self, server):
        response = server.speak(ref_audio="a" * server.service.settings.max_body_bytes)
        server.assert_refused(response, 413, None)

    def test_audio_beyond_the_limit(self, base_server, tmp_path):
        base_server.service.settings = Settings(voices_dir=str(tmp_path), ref_audio_max_bytes=10_000)
        base_server.assert_refused(clone(base_server, **GOOD), 400, "ref_audio")
        response = clone(base_server, **GOOD | {"ref_audio": "A" * 300_000})
        base_server.assert_refused(response, 413, None)

    def test_a_failing_encoder(self, base_server, monkeypatch):
        async def fail(*_, **__):
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(base_server.service, "encode_voice", fail, raising=False)
        error = base_server.assert_refused(clone(base_server, **GOOD), 500, None)
        assert "device" not in error["message"]
        monkeypatch.undo()
        assert clone(base_server, **GOOD).status_code == 200
