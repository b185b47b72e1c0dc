"""The voice encoder: what it returns, that a recording is encoded once, and who has none."""

from __future__ import annotations

import numpy as np
import pytest

from qwen3tts_hw.checkpoint.reader import open_checkpoint
from qwen3tts_hw.engine.voice_encoder import VoiceEncoder
from qwen3tts_hw.errors import RequestError, UnsupportedError
from qwen3tts_hw.types import SAMPLE_RATE_HZ
from tests.parity.reference_audio import reference_audio
from tests.unit.tiny_model import BACKEND

AUDIO = reference_audio(SAMPLE_RATE_HZ // 2)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return open_checkpoint(tiny_checkpoint("base"))


@pytest.fixture
def encoder(checkpoint):
    made = VoiceEncoder(checkpoint.config, BACKEND)
    made.load(checkpoint)
    return made


def test_a_recording_is_encoded_once(encoder, checkpoint):
    voice = encoder.encode(AUDIO, with_codes=True)
    assert len(voice.embedding) == 4 * checkpoint.config.talker.hidden_size
    assert np.frombuffer(voice.codes, "<i2").reshape(-1, 16).shape == (7, 16)
    assert encoder.encode(AUDIO.copy(), with_codes=True) == voice
    assert encoder.encode(AUDIO, with_codes=False) == voice
    assert (encoder.encoded, encoder.reused) == (1, 2)


def test_codes_are_encoded_when_they_are_wanted(encoder):
    without = encoder.encode(AUDIO, with_codes=False)
    assert without.codes == b""
    voice = encoder.encode(AUDIO, with_codes=True)
    assert voice.embedding == without.embedding
    assert voice.codes
    assert (encoder.encoded, encoder.reused) == (2, 0)


def test_recordings_are_told_apart(encoder):
    other = AUDIO.copy()
    other[-1] += 0.01
    assert encoder.encode(AUDIO, with_codes=False) != encoder.encode(other, with_codes=False)
    assert encoder.encoded == 2


def test_other_weights_know_nothing_of_before(encoder, checkpoint):
    encoder.encode(AUDIO, with_codes=True)
    encoder.load(checkpoint)
    encoder.encode(AUDIO, with_codes=True)
    assert encoder.encoded == 2


def test_memory_is_bounded(encoder, monkeypatch):
    monkeypatch.setattr("qwen3tts_hw.engine.voice_encoder.VOICES_KEPT", 2)
    for seed in range(3):
        encoder.encode(reference_audio(4_000, seed), with_codes=False)
    encoder.encode(reference_audio(4_000, 0), with_codes=False)
    assert encoder.encoded == 4


def test_a_clip_that_is_too_short(encoder):
    with pytest.raises(RequestError, match="at least") as caught:
        encoder.encode(AUDIO[:100], with_codes=True)
    assert caught.value.field == "ref_audio"
    assert encoder.encoded == 0


def test_other_checkpoints_have_no_encoders(tiny_checkpoint):
    with pytest.raises(UnsupportedError, match="Base"):
        VoiceEncoder(open_checkpoint(tiny_checkpoint()).config, BACKEND)


def test_fingerprints_tell_speaker_encoders_apart(checkpoint, tiny_checkpoint):
    assert checkpoint.voice_fingerprint() == open_checkpoint(tiny_checkpoint("base")).voice_fingerprint()
    assert checkpoint.voice_fingerprint() != open_checkpoint(tiny_checkpoint("base", seed=1)).voice_fingerprint()
    assert open_checkpoint(tiny_checkpoint()).voice_fingerprint() == ""
