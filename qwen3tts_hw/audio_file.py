"""Writing audio files. Reading belongs to voice cloning and does not exist here."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qwen3tts_hw.types import SAMPLE_RATE_HZ


def write_wav(path: str | Path, pcm: NDArray[np.float32]) -> None:
    """Write ``[n] float32`` samples in [-1, 1] as 16-bit mono WAV at 24 kHz."""
    samples = np.rint(np.clip(np.nan_to_num(pcm), -1.0, 1.0) * 32_767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes(samples.tobytes())
