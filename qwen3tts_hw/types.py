"""Plain values that cross module borders: constants of the 12 Hz codec, sampling, audio chunks.

Owns no behaviour beyond derived properties and knows neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

SAMPLE_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 1_920
FRAME_MS = 80
FRAMES_PER_SECOND = 12.5
NUM_CODEBOOKS = 16
FRAME_CODE_BYTES = 2 * NUM_CODEBOOKS  # where codes travel as int16
CODEBOOK_SIZE = 2_048
MIN_FRAMES = 2  # end of speech is forbidden before (spec 5.1)


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"  # the model emitted end of speech
    LENGTH = "length"  # the frame limit was reached
    ABORT = "abort"  # the client left or the server shut down


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How codes are drawn. A temperature of 0 means greedy (argmax), for both stages.

    ``temperature``, ``top_k``, ``top_p`` and ``repetition_penalty`` concern codebook 0; the ``residual_*`` fields
    concern codebooks 1..15. ``top_k`` 0 and ``top_p`` 1.0 switch that filter off. ``seed`` is 0 .. 2**63 - 1.
    Defaults are those of the published generation_config.json.
    """

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    residual_temperature: float = 0.9
    residual_top_k: int = 50
    residual_top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether codebook 0 is chosen by argmax; residual codes then are too."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class EncodedVoice:
    """What the encoders hear in reference audio: ``embedding`` float32 ``[H]``, ``codes`` int16 ``[R, 16]`` or empty.

    Little-endian, row-major bytes.
    """

    embedding: bytes
    codes: bytes = b""


@dataclass(frozen=True, slots=True)
class ClonedVoice:
    """A voice taken from reference audio, as numbers in little-endian, row-major bytes.

    ``embedding`` is float32 ``[H]``. With ``reference_text`` the speech continues the reference itself: then
    ``reference_codes`` is int16 ``[R, 16]``. Without, both are empty and the embedding alone carries the voice.
    """

    embedding: bytes
    reference_text: str = ""
    reference_codes: bytes = b""

    @property
    def reference_frames(self) -> int:
        """Number of frames of the reference, 0 where the embedding alone is used."""
        return len(self.reference_codes) // FRAME_CODE_BYTES


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """A run of consecutive frames of one request, decoded.

    ``pcm`` is signed 16-bit little-endian mono at 24 kHz, 1,920 samples per frame. ``frames`` is the number of frames
    in this chunk, ``total_frames`` the number delivered so far including it. ``codes`` is int16 ``[frames, 16]`` in
    row-major bytes when the request asked for codes, else empty. ``last`` marks the final chunk, which may be empty.
    """

    pcm: bytes
    frames: int
    total_frames: int
    last: bool = False
    codes: bytes = b""


@dataclass(frozen=True, slots=True)
class SpeechOutcome:
    """How a request ended: known once its last chunk has been delivered."""

    request_id: str
    finish_reason: FinishReason
    frames: int
    prompt_rows: int
    seed: int
    codes: bytes = b""

    @property
    def audio_seconds(self) -> float:
        """Duration of the audio in seconds."""
        return self.frames / FRAMES_PER_SECOND
