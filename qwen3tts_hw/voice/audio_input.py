"""Reference audio as the encoders want it, mono float32 at 24 kHz, from the bytes of an audio file.

The one place where a stranger's audio becomes samples. Everything that can be known before decoding is checked before,
the rest while decoding, block by block, so that a small file which unfolds to hours costs no more than the limit.
Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import soxr
from numpy.typing import NDArray

from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import SAMPLE_RATE_HZ
from qwen3tts_hw.voice.audio_decoding import FIELD, AudioStream, open_audio
from qwen3tts_hw.voice.audio_source import read_source

MIN_RATE_HZ, MAX_RATE_HZ = 8_000, 192_000
MAX_CHANNELS = 2
MAX_PEAK = 8.0  # full scale is 1; some recorders exceed it, integers stored as floats exceed it a thousandfold
MIN_PEAK = 1e-4  # -80 dB: nothing but silence
FULL_SCALE = 0.999


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceAudio:
    """Decoded reference audio: ``samples`` ``[n] float32``, mono, 24 kHz.

    ``clipped_share`` is the share of the file's samples at full scale, before resampling hides them.
    """

    samples: NDArray[np.float32]
    clipped_share: float
    format_name: str
    source_rate_hz: int
    source_channels: int

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.samples) / SAMPLE_RATE_HZ


def load_reference(source: str, settings: Settings) -> ReferenceAudio:
    """Take in a request's ``ref_audio``: a data URL, base64 text, or an address that the operator allows.

    May read a file or wait for another host. Raises RequestError saying what was found and what would work.
    """
    return decode_reference(read_source(source, settings), settings)


def decode_reference(data: bytes, settings: Settings) -> ReferenceAudio:
    """Decode an audio file's bytes within the limits of ``settings``.

    Channels are averaged and other rates resampled as the official package does it. Raises RequestError.
    """
    if len(data) > settings.ref_audio_max_bytes:
        raise RequestError(
            FIELD,
            f"the reference audio has {len(data)} bytes; at most {settings.ref_audio_max_bytes} are accepted, so send "
            "a shorter clip or a compressed format",
        )
    if not data:
        raise RequestError(FIELD, "the reference audio is empty")
    with open_audio(data) as stream:
        _check_declared(stream, settings.ref_audio_max_seconds)
        mono, clipped_share = _decode(stream, settings.ref_audio_max_seconds)
        _check_samples(mono)
        return ReferenceAudio(
            samples=resample(mono, stream.rate_hz),
            clipped_share=clipped_share,
            format_name=stream.format_name,
            source_rate_hz=stream.rate_hz,
            source_channels=stream.channels,
        )


def resample(mono: NDArray[np.float32], rate_hz: int) -> NDArray[np.float32]:
    """Bring samples of another rate to 24 kHz with soxr's high quality; the length is rounded up."""
    if rate_hz == SAMPLE_RATE_HZ:
        return mono
    length = math.ceil(len(mono) * (SAMPLE_RATE_HZ / rate_hz))
    resampled = soxr.resample(mono, rate_hz, SAMPLE_RATE_HZ, quality="HQ")[:length]
    padded: NDArray[np.float32] = np.pad(resampled, (0, length - len(resampled)))
    return padded


def _check_declared(stream: AudioStream, max_seconds: int) -> None:
    if not MIN_RATE_HZ <= stream.rate_hz <= MAX_RATE_HZ:
        raise RequestError(
            FIELD,
            f"the reference audio has {stream.rate_hz} samples per second; {MIN_RATE_HZ} to {MAX_RATE_HZ} are accepted",
        )
    if not 1 <= stream.channels <= MAX_CHANNELS:
        raise RequestError(FIELD, f"the reference audio has {stream.channels} channels; send it in mono or stereo")
    if stream.frames is None:
        return
    if stream.frames < 1:
        raise RequestError(FIELD, "the reference audio has no samples")
    if stream.frames > max_seconds * stream.rate_hz:
        raise RequestError(
            FIELD,
            f"the reference audio lasts {stream.frames / stream.rate_hz:.1f} s; at most {max_seconds} s are accepted, "
            "and 3 to 15 s work well",
        )


def _decode(stream: AudioStream, max_seconds: int) -> tuple[NDArray[np.float32], float]:
    """Decode to mono and the share of samples at full scale, stopping at the limit whatever the file declared."""
    parts: list[NDArray[np.float32]] = []
    frames = clipped = 0
    for block in stream.blocks:
        frames += len(block)
        if frames > max_seconds * stream.rate_hz:
            raise RequestError(
                FIELD,
                f"the reference audio lasts more than {max_seconds} s, which is the limit; 3 to 15 s work well",
            )
        clipped += int(np.count_nonzero(np.abs(block) >= FULL_SCALE))
        with np.errstate(invalid="ignore", over="ignore"):  # what is no number is found afterwards
            parts.append(block.mean(axis=1))
    if not frames:
        raise RequestError(FIELD, "the reference audio has no samples")
    return np.concatenate(parts), clipped / (frames * stream.channels)


def _check_samples(mono: NDArray[np.float32]) -> None:
    if not np.isfinite(mono).all():
        raise RequestError(FIELD, "the reference audio holds samples that are not numbers (NaN or infinite)")
    peak = float(np.abs(mono).max())
    if peak > MAX_PEAK:
        raise RequestError(
            FIELD, f"the reference audio reaches {peak:.6g}, but full scale of floating-point audio is 1; scale it down"
        )
    if peak < MIN_PEAK:
        raise RequestError(FIELD, "the reference audio is silent")
