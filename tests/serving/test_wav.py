"""WAV headers are right, byte for byte and for readers that are not ours."""

from __future__ import annotations

import io
import wave

import pytest
import soundfile

from qwen3tts_hw.serving.wav import HEADER_BYTES, fix_sizes, wav_header
from tests.serving.fake_service import saw_tooth


def test_a_sized_file_is_read_by_wave_and_soundfile() -> None:
    pcm = saw_tooth(0, 3)
    data = wav_header(len(pcm)) + pcm
    with wave.open(io.BytesIO(data)) as reader:
        assert (reader.getnchannels(), reader.getsampwidth(), reader.getframerate()) == (1, 2, 24_000)
        assert reader.readframes(reader.getnframes()) == pcm
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == 24_000
    assert samples.tobytes() == pcm


def test_a_header_of_unknown_length_has_all_bits_set_in_both_sizes() -> None:
    header = wav_header()
    assert len(header) == HEADER_BYTES
    assert header[4:8] == header[40:44] == b"\xff\xff\xff\xff"
    assert header[8:40] == wav_header(0)[8:40]


def test_fixing_the_sizes_of_a_streamed_file_makes_it_the_sized_file() -> None:
    pcm = saw_tooth(0, 2)
    assert fix_sizes(wav_header() + pcm) == wav_header(len(pcm)) + pcm


@pytest.mark.parametrize("data", [b"", b"RIFF", b"\0" * 100, wav_header()[:43]], ids=["empty", "cut", "zeros", "43"])
def test_fixing_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a WAV file"):
        fix_sizes(data)


@pytest.mark.parametrize("size", [-1, 2**32])
def test_a_size_that_does_not_fit_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="a WAV file holds"):
        wav_header(size)
