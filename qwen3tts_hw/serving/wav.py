"""WAV framing of 16-bit mono PCM at 24 kHz, for audio whose length is known and for audio still being made.

A streamed file says 0xFFFFFFFF where its sizes belong, the convention for "until the end of the stream" that ffmpeg
writes to a pipe and players accept; :func:`fix_sizes` makes such a file exact once all of it has arrived.
"""

from __future__ import annotations

import struct

from qwen3tts_hw.types import SAMPLE_RATE_HZ

BYTES_PER_SAMPLE = 2
HEADER_BYTES = 44
UNKNOWN_SIZE = 0xFFFFFFFF
_LARGEST_DATA_BYTES = UNKNOWN_SIZE - HEADER_BYTES
_DATA_SIZE_AT = 40


def wav_header(data_bytes: int | None = None, *, sample_rate_hz: int = SAMPLE_RATE_HZ) -> bytes:
    """Return the 44 bytes before ``data_bytes`` of PCM; None means that the length is not known yet."""
    if data_bytes is None:
        riff_size = data_size = UNKNOWN_SIZE
    elif 0 <= data_bytes <= _LARGEST_DATA_BYTES:
        riff_size, data_size = HEADER_BYTES - 8 + data_bytes, data_bytes
    else:
        raise ValueError(f"a WAV file holds 0..{_LARGEST_DATA_BYTES} bytes of audio, asked for {data_bytes}")
    form = struct.pack("<4sI4s", b"RIFF", riff_size, b"WAVE")
    bytes_per_second = sample_rate_hz * BYTES_PER_SAMPLE
    bits = 8 * BYTES_PER_SAMPLE
    pcm_format = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate_hz, bytes_per_second, BYTES_PER_SAMPLE, bits)
    return form + pcm_format + struct.pack("<4sI", b"data", data_size)


def fix_sizes(wav: bytes) -> bytes:
    """Return a streamed file of this module with its true sizes; raise ValueError if it is not one."""
    if len(wav) < HEADER_BYTES or wav[:4] != b"RIFF" or wav[8:12] != b"WAVE" or wav[36:_DATA_SIZE_AT] != b"data":
        raise ValueError(f"not a WAV file with a {HEADER_BYTES}-byte header ({len(wav)} bytes)")
    data = wav[HEADER_BYTES:]
    (sample_rate_hz,) = struct.unpack_from("<I", wav, 24)
    return wav_header(len(data), sample_rate_hz=sample_rate_hz) + data
