"""Files of every supported format become mono 24 kHz samples; everything else is refused before it costs anything."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace

import av
import numpy as np
import pytest
import soundfile

from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.voice import audio_input
from qwen3tts_hw.voice.audio_decoding import AudioStream
from qwen3tts_hw.voice.audio_input import ReferenceAudio, decode_reference, resample

SETTINGS = Settings()


def tone(samples: int, rate_hz: int = 24_000, hz: float = 440.0) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hz * np.arange(samples) / rate_hz)).astype(np.float32)


def encoded(samples: np.ndarray, rate_hz: int = 24_000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate_hz, format=kind, subtype=subtype)
    return buffer.getvalue()


def packed(samples: np.ndarray, container: str, codec: str, rate_hz: int = 48_000) -> bytes:
    """Encode mono samples with PyAV."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate_hz, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate_hz
        converter = av.AudioResampler(format=stream.format, layout="mono", rate=rate_hz, frame_size=stream.frame_size)
        for part in [*converter.resample(frame), *converter.resample(None), None]:
            output.mux(stream.encode(part))
    return buffer.getvalue()


def with_flac_length(data: bytes, frames: int) -> bytes:
    """Replace the 36-bit number of samples in the header of a FLAC file; 0 means unknown."""
    bits = int.from_bytes(data[18:26], "big") >> 36 << 36
    return data[:18] + (bits | frames).to_bytes(8, "big") + data[26:]


GOOD = encoded(tone(4_800))
SILENT_HALF_HOUR = encoded(np.zeros(1_800 * 8_000, np.float32), 8_000, "FLAC")


def decode(data: bytes, settings: Settings = SETTINGS) -> ReferenceAudio:
    return decode_reference(data, settings)


def assert_refused(data: bytes, message: str, settings: Settings = SETTINGS) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        decode(data, settings)
    assert caught.value.field == "ref_audio"
    assert len(decode(GOOD).samples) == 4_800  # the next request is served


def assert_is_tone(audio: ReferenceAudio, seconds: float, tolerance: float) -> None:
    """The middle of the audio is the tone, wherever it starts."""
    assert audio.samples.dtype == np.float32
    assert audio.samples.ndim == 1
    assert audio.seconds == pytest.approx(seconds, abs=0.05)
    middle = audio.samples[len(audio.samples) // 4 : -len(audio.samples) // 4].astype(np.float64)
    angles = 2 * np.pi * 440.0 * np.arange(len(middle)) / 24_000
    basis = np.stack([np.sin(angles), np.cos(angles)], 1)
    amplitudes, *_ = np.linalg.lstsq(basis, middle, rcond=None)
    assert np.hypot(*amplitudes) == pytest.approx(0.3, rel=0.1)
    assert np.abs(basis @ amplitudes - middle).max() < tolerance


class TestFormats:
    def test_float_wav_at_24_khz_is_taken_as_it_is(self):
        samples = tone(1_921)
        audio = decode(encoded(samples, subtype="FLOAT"))
        np.testing.assert_array_equal(audio.samples, samples)
        assert (audio.format_name, audio.source_rate_hz, audio.source_channels) == ("WAV", 24_000, 1)

    @pytest.mark.parametrize(
        ("kind", "subtype", "tolerance"),
        [
            ("WAV", "PCM_16", 1e-4),
            ("WAV", "PCM_24", 1e-6),
            ("WAV", "PCM_U8", 0.01),
            ("WAV", "DOUBLE", 1e-6),
            ("RF64", "PCM_16", 1e-4),
            ("FLAC", "PCM_16", 1e-4),
            ("OGG", "VORBIS", 0.05),
            ("OGG", "OPUS", 0.05),
            ("MP3", None, 0.05),
            ("AIFF", "PCM_16", 1e-4),
            ("AU", "PCM_16", 1e-4),
            ("CAF", "PCM_16", 1e-4),
        ],
    )
    def test_of_libsndfile(self, kind, subtype, tolerance):
        assert_is_tone(decode(encoded(tone(24_000), 24_000, kind, subtype)), 1.0, tolerance)

    @pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("adts", "aac"), ("webm", "libopus")])
    def test_of_pyav(self, container, codec):
        assert_is_tone(decode(packed(tone(48_000, 48_000), container, codec)), 1.0, 0.2)  # the AAC encoder is coarse

    def test_of_pyav_are_named_where_it_is_missing(self, monkeypatch):
        data = packed(tone(48_000, 48_000), "mp4", "aac")
        monkeypatch.setitem(sys.modules, "av", None)
        assert_refused(data, "lacks PyAV")

    @pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050, 44_100, 48_000, 96_000, 192_000])
    def test_other_rates_are_resampled(self, rate_hz):
        audio = decode(encoded(tone(rate_hz + 1, rate_hz), rate_hz, subtype="FLOAT"))
        assert len(audio.samples) == -(-24_000 * (rate_hz + 1) // rate_hz)
        assert_is_tone(audio, 1.0, 1e-4)

    def test_resampling_passes_what_both_rates_hold_and_stops_the_rest(self):
        kept, stopped = (resample(tone(48_000, 48_000, hz), 48_000) for hz in (10_000.0, 13_500.0))
        assert np.abs(kept[1_000:-1_000]).max() == pytest.approx(0.3, rel=0.01)
        assert np.abs(stopped[1_000:-1_000]).max() < 1e-3

    def test_stereo_is_averaged(self):
        left, right = tone(4_800), 0.5 * tone(4_800, hz=300.0)
        audio = decode(encoded(np.stack([left, right], 1), subtype="FLOAT"))
        np.testing.assert_array_equal(audio.samples, (left + right) / 2)
        assert audio.source_channels == 2

    def test_full_scale_is_counted_before_resampling(self):
        samples = tone(48_000, 48_000)
        samples[:4_800] = 1.0
        assert decode(encoded(samples, 48_000)).clipped_share == pytest.approx(0.1, abs=1e-3)
        assert decode(GOOD).clipped_share == 0.0


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "is empty"),
            (b"hello there, this is text", "begins with b'hello th'"),
            (b"<!doctype html>", "looks like HTML"),
            (b"PK\x03\x04" + bytes(60), "looks like a ZIP file"),
            (b"\x89PNG\r\n\x1a\n" + bytes(60), "looks like a PNG image"),
            (b"#EXTM3U\nhttp://169.254.169.254/\n", "no known audio format"),
            (bytes(2_000), "no known audio format"),
            (b"RIFF" + bytes(100), "damaged or cut short: Format not recognised"),
            (GOOD[:20], "damaged or cut short"),
            (b"fLaC" + b"\xff" * 60, "damaged or cut short"),
            (b"OggS" + b"x" * 60, "damaged or cut short"),
            (b"ID3" + bytes(100), "damaged or cut short"),
            (b"\0\0\0\x18ftypmp42" + bytes(60), "damaged or cut short"),
            (b"\x1a\x45\xdf\xa3" + bytes(60), "damaged or cut short"),
        ],
    )
    def test_what_is_no_audio(self, data, message):
        assert_refused(data, message)

    def test_cut_short_while_decoding(self):
        noise = np.random.RandomState(0).uniform(-0.5, 0.5, 48_000)
        assert_refused(encoded(noise, kind="FLAC")[:40_000], "damaged or cut short: flac decoder lost sync")

    @pytest.mark.parametrize("kind", ["WAV", "OGG"])
    def test_no_samples(self, kind):
        assert_refused(encoded(np.zeros(0, np.float32), kind=kind), "has no samples")

    def test_a_video_without_sound(self):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="mp4") as output:
            stream = output.add_stream("mpeg4", rate=25)
            stream.width = stream.height = 16
            stream.pix_fmt = "yuv420p"
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")))
            output.mux(stream.encode(None))
        assert_refused(buffer.getvalue(), "without an audio track")

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_samples_that_are_not_numbers(self, value):
        samples = np.stack([tone(4_800), tone(4_800)], 1)
        samples[4_000] = (value, -value)
        assert_refused(encoded(samples, subtype="FLOAT"), "NaN or infinite")

    def test_integers_stored_as_floats(self):
        assert_refused(encoded(32_768 * tone(4_800), subtype="FLOAT"), "full scale of floating-point audio is 1")

    def test_silence(self):
        assert_refused(encoded(np.zeros(24_000)), "is silent")

    @pytest.mark.parametrize("channels", [3, 5, 64])
    def test_more_than_two_channels(self, channels):
        data = encoded(np.repeat(tone(4_800)[:, None], channels, 1))
        assert_refused(data, f"has {channels} channels; send it in mono or stereo")

    @pytest.mark.parametrize("rate_hz", [1, 4_000, 384_000, 2**31 - 1])
    def test_rates_of_no_recording(self, rate_hz):
        data = bytearray(GOOD)
        data[24:28] = struct.pack("<I", rate_hz)
        assert_refused(bytes(data), f"has {rate_hz} samples per second; 8000 to 192000")


class TestLimits:
    def test_of_bytes(self):
        settings = replace(SETTINGS, ref_audio_max_bytes=9_643)
        assert len(GOOD) == 9_644
        with pytest.raises(RequestError, match="has 9644 bytes; at most 9643 are accepted"):
            decode(GOOD, settings)
        assert decode(GOOD, replace(settings, ref_audio_max_bytes=9_644)).seconds == 0.2

    def test_of_seconds(self):
        settings = replace(SETTINGS, ref_audio_max_seconds=1)
        assert decode(encoded(tone(24_000)), settings).seconds == 1.0
        assert_refused(encoded(tone(24_001)), r"lasts 1\.0 s; at most 1 s are accepted", settings)

    def test_half_an_hour_in_little_space_is_not_decoded(self, monkeypatch):
        def fail(*args, **kwargs):
            raise AssertionError("the file was decoded")

        assert len(SILENT_HALF_HOUR) < 100_000
        with monkeypatch.context() as patched:
            patched.setattr(soundfile.SoundFile, "read", fail)
            with pytest.raises(RequestError, match=r"lasts 1800\.0 s; at most 60 s are accepted"):
                decode(SILENT_HALF_HOUR)
        assert decode(GOOD).seconds == 0.2

    @pytest.mark.parametrize("declared", [0, 2**36 - 1])
    def test_a_length_that_is_not_stated_is_not_searched_for(self, declared):
        assert_refused(with_flac_length(SILENT_HALF_HOUR, declared), "does not say how long")

    def test_a_length_that_is_understated_is_kept_to(self):
        data = encoded(tone(1_800 * 80, 8_000), 8_000, "FLAC")
        assert decode(with_flac_length(data, 8_000)).seconds == 1.0

    def test_of_files_that_state_no_length(self):
        data = packed(tone(3 * 48_000, 48_000), "adts", "aac")
        assert decode(data).seconds == pytest.approx(3.0, abs=0.1)
        assert_refused(data, "lasts more than 1 s", replace(SETTINGS, ref_audio_max_seconds=1))

    def test_stop_endless_audio(self):
        decoded = 0

        def endless() -> Iterator[np.ndarray]:
            nonlocal decoded
            while True:
                decoded += 8_000
                yield np.ones((8_000, 2), np.float32)

        with pytest.raises(RequestError, match="lasts more than 60 s"):
            audio_input._decode(AudioStream("endless", 8_000, 2, None, endless()), 60)
        assert decoded == 61 * 8_000
