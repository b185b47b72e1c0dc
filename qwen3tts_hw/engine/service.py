"""The speech service: the surface that routes, benchmarks and the command line see, whatever engine stands behind it.

Only Protocols and plain values; implementations are :mod:`qwen3tts_hw.vllm_plugin.service` (vLLM) and fakes in tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.prompt.request import SpeechRequest
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import AudioChunk, EncodedVoice, SpeechOutcome


class SpeechStream(Protocol):
    """One running request: iterate it for its chunks, close it to cancel."""

    @property
    def request_id(self) -> str:
        """Identifier of the request, unique in this server."""

    @property
    def outcome(self) -> SpeechOutcome | None:
        """How the request ended; None until the chunk marked ``last`` has been delivered."""

    def __aiter__(self) -> AsyncIterator[AudioChunk]:
        """Yield chunks in order; the final one is marked ``last``. Raises GenerationError if the engine fails."""

    async def aclose(self) -> None:
        """Stop the request if it still runs and free what it holds; may be called at any time, more than once."""


class SpeechService(Protocol):
    """Submit speech requests to an engine and describe it."""

    config: ModelConfig
    settings: Settings
    voice_fingerprint: str
    """What tells whether a speaker embedding was made for this checkpoint; "" where voices are not cloned."""

    async def submit(self, request: SpeechRequest, *, include_codes: bool = False) -> SpeechStream:
        """Start a request. Raises RequestError if its prompt does not fit, CapacityError if there is no room."""

    async def encode_voice(self, samples: NDArray[np.float32], *, with_codes: bool) -> EncodedVoice:
        """Encode reference audio, mono at 24 kHz; what was encoded before costs no encoder work.

        Raises RequestError for a recording that is too short, or where the checkpoint does not clone voices.
        """

    def outcome(self, request_id: str) -> SpeechOutcome | None:
        """How a recent request ended; None if it is unknown, still running, or long gone."""

    async def health(self) -> dict[str, Any]:
        """State and chosen code paths (device, attention op, graph mode, dtypes); raises if the engine is dead."""

    async def stats(self) -> dict[str, Any]:
        """Counters of this process and of the workers: slots in use, queue sizes, preemptions, dropped messages."""
