"""Reference recordings as clients send them: WAV files of many kinds, good and bad."""

from __future__ import annotations

import base64
import io

import numpy as np
import soundfile

from qwen3tts_hw.types import SAMPLE_RATE_HZ
from tests.parity.reference_audio import reference_audio


def wav(samples: np.ndarray, rate_hz: int = SAMPLE_RATE_HZ, subtype: str = "PCM_16", form: str = "WAV") -> bytes:
    """Samples as a file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, subtype=subtype, format=form)
    return file.getvalue()


def recording(samples: int = 12_000, seed: int = 0) -> bytes:
    """A good one."""
    return wav(reference_audio(samples, seed))


def data_url(audio: bytes, media_type: str = "audio/wav") -> str:
    """The form in which a speech request carries it."""
    return f"data:{media_type};base64,{base64.b64encode(audio).decode()}"


def bad_recordings() -> dict[str, bytes]:
    """Files that cannot be references, by what is wrong with them."""
    tone = reference_audio(4_800)
    silence = np.zeros(1_800 * 8_000, np.float32)  # half an hour
    return {
        "not audio": b"Hello there, this is text.",
        "an archive": b"PK\x03\x04" + bytes(100),
        "cut short": recording()[:30],
        "no samples": wav(tone[:0]),
        "NaN samples": wav(np.full(4_800, np.nan, np.float32), subtype="FLOAT"),
        "infinite samples": wav(np.full(4_800, np.inf, np.float32), subtype="FLOAT"),
        "five channels": wav(np.stack([tone] * 5, axis=1)),
        "a huge scale": wav(tone * 30_000, subtype="FLOAT"),
        "silence": wav(np.zeros(4_800, np.float32)),
        "half an hour": wav(silence, 8_000, "PCM_U8"),
        "half an hour packed into little": wav(silence, 8_000, "PCM_16", "FLAC"),
        "a rate beyond all": wav(tone, 384_000),
    }


def odd_recordings() -> dict[str, bytes]:
    """Files that are unusual and work."""
    tone = reference_audio(12_000)
    return {
        "8 bits": wav(tone, subtype="PCM_U8"),
        "192 kHz": wav(np.repeat(tone, 8), 192_000),
        "stereo": wav(np.stack([tone, tone], axis=1)),
        "FLAC": wav(tone, form="FLAC"),
        "8 kHz": wav(tone[::3], 8_000),
    }
