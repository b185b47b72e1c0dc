"""Owns the reference recordings of the golden data: synthetic voices, the same sample by sample on every machine.

Nothing is stored: a recording follows from its length and its seed. The values lie on the 16-bit grid of a WAV file, so
neither the platform's sine nor its rounding of intermediate results shows.
"""

from __future__ import annotations

import hashlib

import numpy as np

from qwen3tts_hw.types import SAMPLE_RATE_HZ

PARTIALS = 12
FULL_SCALE = 32_768
TABLE_SIZE = 4_096


def reference_audio(samples: int, seed: int = 0) -> np.ndarray:
    """Return a gliding, pulsing harmonic tone over faint noise, ``[samples] float32`` within -1..1."""
    rng = np.random.RandomState(seed)
    time = np.arange(samples, dtype=np.float64) / SAMPLE_RATE_HZ
    pitch_hz = 90.0 + 20.0 * rng.randint(0, 8)
    turns = pitch_hz * time + 0.08 * pitch_hz * (time - np.floor(time)) ** 2  # pitch rises within every second
    pulse = 0.35 + 0.65 * _sine(rng.randint(2, 6) * time) ** 2  # syllables
    tone = np.zeros(samples)
    for partial in range(1, PARTIALS + 1):
        loudness = rng.randint(16, 256) / 256.0 / partial
        tone += loudness * _sine(partial * turns + rng.randint(0, TABLE_SIZE) / TABLE_SIZE)
    noise = rng.randint(-1_024, 1_025, size=samples) / FULL_SCALE
    mixed = 0.25 * pulse * tone + 0.25 * noise
    grid = np.clip(np.round(mixed * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1)
    return (grid / FULL_SCALE).astype(np.float32)


def audio_checksum(audio: np.ndarray) -> str:
    """Return the SHA-256 of a recording's samples."""
    return hashlib.sha256(audio.astype("<f4").tobytes()).hexdigest()


def _sine(turns: np.ndarray) -> np.ndarray:
    """Return the sine of an angle in turns from a table on a grid of 2**-20, which hides the last bits of NumPy's."""
    table = np.round(np.sin(2.0 * np.pi * np.arange(TABLE_SIZE) / TABLE_SIZE) * 2**20) / 2**20
    return table[np.floor((turns - np.floor(turns)) * TABLE_SIZE).astype(np.int64) % TABLE_SIZE]
