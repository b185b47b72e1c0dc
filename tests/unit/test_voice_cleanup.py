"""Clean-up of reference audio does what it says and nothing unasked; advice names what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.voice.audio_input import ReferenceAudio
from qwen3tts_hw.voice.cleanup import (
    CleanupOptions,
    advice,
    clean_up,
    normalize_loudness,
    speech_level_db,
    trim_silence,
    window_levels_db,
)

SECOND = 24_000


def speech(seconds: float, level: float = 0.1) -> np.ndarray:
    """Noise of a level, as root mean square."""
    return np.random.RandomState(1).normal(0.0, level, int(seconds * SECOND)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * SECOND), np.float32)


def reference(samples: np.ndarray, **changes: object) -> ReferenceAudio:
    given = {"clipped_share": 0.0, "format_name": "WAV", "source_rate_hz": 24_000, "source_channels": 1}
    return ReferenceAudio(samples=samples, **{**given, **changes})


class TestNothing:
    def test_is_done_unasked(self):
        samples = np.concatenate([silence(1), 3 * speech(1), silence(1)])
        assert clean_up(samples, CleanupOptions()) is samples


class TestTrim:
    def test_cuts_both_ends_but_for_a_margin(self):
        samples = np.concatenate([silence(1), speech(2), silence(0.5)])
        trimmed = clean_up(samples, CleanupOptions(trim_silence=True))
        np.testing.assert_array_equal(trimmed, samples[SECOND - 1_200 : 3 * SECOND + 1_200])

    def test_counts_faint_noise_as_silence(self):
        samples = np.concatenate([speech(1, 1e-4), speech(2), speech(1, 1e-4)])
        assert len(trim_silence(samples)) == 2 * SECOND + 2_400

    def test_keeps_pauses_and_soft_speech(self):
        samples = np.concatenate([speech(1), silence(1), speech(1, 0.01)])
        np.testing.assert_array_equal(trim_silence(samples), samples)

    @pytest.mark.parametrize("samples", [silence(1), silence(0), speech(0.01)])
    def test_leaves_what_has_no_ends_to_cut(self, samples):
        np.testing.assert_array_equal(trim_silence(samples), samples)


class TestLoudness:
    @pytest.mark.parametrize("level", [1e-3, 0.02, 0.5])
    def test_brings_speech_to_the_target(self, level):
        samples = np.concatenate([silence(2), speech(1, level)])
        normal = clean_up(samples, CleanupOptions(normalize_loudness=True))
        assert normal.dtype == np.float32
        assert speech_level_db(normal) == pytest.approx(-23.0, abs=0.01)

    def test_stays_below_full_scale(self):
        samples = speech(1, 1e-3)
        samples[100] = 0.5
        normal = normalize_loudness(samples)
        assert np.abs(normal).max() == pytest.approx(0.9)
        np.testing.assert_allclose(normal, 1.8 * samples, rtol=1e-6)

    def test_leaves_silence(self):
        np.testing.assert_array_equal(normalize_loudness(silence(1)), silence(1))

    def test_level_of_a_tone(self):
        tone = 0.5 * np.sin(2 * np.pi * 400 * np.arange(SECOND) / SECOND)
        assert speech_level_db(tone.astype(np.float32)) == pytest.approx(20 * np.log10(0.5 / np.sqrt(2)), abs=1e-3)
        assert speech_level_db(silence(1)) == -np.inf

    def test_a_short_last_window_counts_by_its_length(self):
        np.testing.assert_allclose(window_levels_db(np.full(500, 0.1, np.float32)), [-20.0, -20.0], atol=1e-5)


class TestTrailingSilence:
    def test_is_appended(self):
        samples = speech(1)
        padded = clean_up(samples, CleanupOptions(trailing_silence_ms=500))
        np.testing.assert_array_equal(padded, np.concatenate([samples, silence(0.5)]))

    def test_survives_trimming(self):
        options = CleanupOptions(trim_silence=True, normalize_loudness=True, trailing_silence_ms=500)
        cleaned = clean_up(np.concatenate([speech(1), silence(3)]), options)
        assert len(cleaned) == SECOND + 1_200 + SECOND // 2

    @pytest.mark.parametrize("milliseconds", [-1, 5_001])
    def test_of_absurd_length_is_refused(self, milliseconds):
        with pytest.raises(RequestError, match="0 to 5000 are accepted") as caught:
            CleanupOptions(trailing_silence_ms=milliseconds)
        assert caught.value.field == "trailing_silence_ms"


class TestAdvice:
    def test_is_silent_about_a_good_recording(self):
        assert advice(reference(speech(8), source_rate_hz=16_000, clipped_share=5e-4)) == ()

    @pytest.mark.parametrize(
        ("audio", "sentence"),
        [
            (reference(speech(8), clipped_share=0.02), "2.0% of the samples are at full scale"),
            (reference(np.concatenate([speech(2), silence(6)])), "only 2.0 s of it are not silent"),
            (reference(speech(30)), "it lasts 30.0 s; more than 20 s cost time"),
            (reference(speech(8, 1e-3)), "very quiet (-60 dB)"),
            (reference(speech(8), source_rate_hz=8_000), "recorded at 8000 Hz"),
        ],
    )
    def test_names_what_is_wrong(self, audio, sentence):
        (found,) = advice(audio)
        assert sentence in found
