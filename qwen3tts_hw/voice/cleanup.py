"""Optional clean-up of reference audio, and advice about it.

Everything is off unless asked for: the official package takes recordings as they are. Plain NumPy on mono 24 kHz
samples; knows no files and no models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import SAMPLE_RATE_HZ
from qwen3tts_hw.voice.audio_input import ReferenceAudio

Samples = NDArray[np.float32]

WINDOW_SAMPLES = SAMPLE_RATE_HZ // 50  # 20 ms: loudness is measured window by window
SPEECH_BELOW_LOUDEST_DB = 40.0  # a window this far below the loudest one is not speech
TRIM_MARGIN_SAMPLES = SAMPLE_RATE_HZ // 20  # 50 ms kept around the speech, for soft onsets
TARGET_SPEECH_DB = -23.0
MAX_PEAK = 0.9
MAX_TRAILING_SILENCE_MS = 5_000
CLIPPED_SHARE = 1e-3
SHORT_SECONDS, LONG_SECONDS = 3.0, 20.0
QUIET_SPEECH_DB = -45.0


@dataclass(frozen=True, slots=True)
class CleanupOptions:
    """What to do with a recording before it is encoded.

    trim_silence: cut what is silent before and after the speech, but for 50 ms.
    normalize_loudness: bring the speech to -23 dB, or as near as its peaks allow.
    trailing_silence_ms: silence to append. Where the reference's last sound is heard at the start of the speech made
        with its text, half a second of it was found to help; it costs that many frames of prompt.
    """

    trim_silence: bool = False
    normalize_loudness: bool = False
    trailing_silence_ms: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.trailing_silence_ms <= MAX_TRAILING_SILENCE_MS:
            raise RequestError(
                "trailing_silence_ms",
                f"trailing_silence_ms is {self.trailing_silence_ms}; 0 to {MAX_TRAILING_SILENCE_MS} are accepted",
            )

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        *,
        trim: bool | None = None,
        loudness: bool | None = None,
        silence_ms: int | None = None,
    ) -> CleanupOptions:
        """The options that are given, and the settings' for those that are None."""
        return cls(
            settings.ref_audio_trim_silence if trim is None else trim,
            settings.ref_audio_normalize_loudness if loudness is None else loudness,
            settings.ref_audio_trailing_silence_ms if silence_ms is None else silence_ms,
        )


def clean_up(samples: Samples, options: CleanupOptions) -> Samples:
    """Apply the options in the order in which they are listed; without any, return ``samples`` itself."""
    if options.trim_silence:
        samples = trim_silence(samples)
    if options.normalize_loudness:
        samples = normalize_loudness(samples)
    if options.trailing_silence_ms:
        silence = np.zeros(options.trailing_silence_ms * SAMPLE_RATE_HZ // 1_000, np.float32)
        samples = np.concatenate([samples, silence])
    return samples


def trim_silence(samples: Samples) -> Samples:
    """Cut silence at both ends, keeping a margin; audio without speech is returned as it is."""
    speech = np.flatnonzero(_is_speech(window_levels_db(samples)))
    if not len(speech):
        return samples
    first = int(speech[0]) * WINDOW_SAMPLES - TRIM_MARGIN_SAMPLES
    stop = (int(speech[-1]) + 1) * WINDOW_SAMPLES + TRIM_MARGIN_SAMPLES
    return samples[max(0, first) : stop]


def normalize_loudness(samples: Samples) -> Samples:
    """Scale the speech to the target level, less if its peaks would come near full scale."""
    peak = float(np.abs(samples).max(initial=0.0))
    if peak == 0.0:
        return samples
    gain = min(10.0 ** ((TARGET_SPEECH_DB - speech_level_db(samples)) / 20.0), MAX_PEAK / peak)
    scaled: Samples = (samples * np.float32(gain)).astype(np.float32)
    return scaled


def speech_level_db(samples: Samples) -> float:
    """Mean level of the windows that hold speech, in dB below full scale; -inf for digital silence."""
    levels = window_levels_db(samples)
    powers = 10.0 ** (levels[_is_speech(levels)] / 10.0)
    return float(10.0 * np.log10(powers.mean())) if len(powers) else -np.inf


def window_levels_db(samples: Samples) -> NDArray[np.float64]:
    """Root-mean-square level of each 20 ms, in dB below full scale; the last window may be shorter."""
    starts = np.arange(0, len(samples), WINDOW_SAMPLES)
    if not len(starts):
        return np.zeros(0)
    energies = np.add.reduceat(np.square(samples, dtype=np.float64), starts)
    lengths = np.minimum(WINDOW_SAMPLES, len(samples) - starts)
    with np.errstate(divide="ignore"):
        levels: NDArray[np.float64] = 10.0 * np.log10(energies / lengths)
    return levels


def _is_speech(levels_db: NDArray[np.float64]) -> NDArray[np.bool_]:
    loudest = levels_db.max(initial=-np.inf)
    speech: NDArray[np.bool_] = (levels_db > -np.inf) & (levels_db >= loudest - SPEECH_BELOW_LOUDEST_DB)
    return speech


def advice(audio: ReferenceAudio) -> tuple[str, ...]:
    """Sentences about what keeps a recording from being a good reference; empty if nothing does."""
    found = []
    spoken = float(np.count_nonzero(_is_speech(window_levels_db(audio.samples)))) * WINDOW_SAMPLES / SAMPLE_RATE_HZ
    level = speech_level_db(audio.samples)
    if audio.clipped_share > CLIPPED_SHARE:
        found.append(f"{audio.clipped_share:.1%} of the samples are at full scale: the recording is probably clipped")
    if spoken < SHORT_SECONDS:
        found.append(
            f"only {spoken:.1f} s of it are not silent; voices are matched better from {SHORT_SECONDS:.0f} s on"
        )
    if audio.seconds > LONG_SECONDS:
        found.append(f"it lasts {audio.seconds:.1f} s; more than {LONG_SECONDS:.0f} s cost time and add little")
    if level < QUIET_SPEECH_DB:
        found.append(f"the speech is very quiet ({level:.0f} dB); normalising its loudness may help")
    if audio.source_rate_hz < SAMPLE_RATE_HZ // 3 * 2:
        found.append(f"it was recorded at {audio.source_rate_hz} Hz, so the voice will sound as over a telephone")
    return tuple(found)
