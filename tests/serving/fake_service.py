"""A SpeechService without an engine: plays a script, and counts what is done to its streams.

The audio is a saw tooth over the sample index and code ``g`` of frame ``k`` is ``16 * k + g``, so that loss, repetition
and reordering of chunks show. It runs in the server's thread; tests read its counters from theirs.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3tts_hw.config import CodecDecoderConfig, CodecTokens, DecoderStackConfig, ModelConfig, TextTokens
from qwen3tts_hw.prompt.request import SpeechRequest
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import SAMPLES_PER_FRAME, AudioChunk, EncodedVoice, FinishReason, SpeechOutcome

PROMPT_ROWS = 11


def model_config(variant: str = "custom_voice", size_name: str = "1b7") -> ModelConfig:
    """Return a config of two voices, one with a dialect, and three languages; the sizes mean nothing."""
    stack = DecoderStackConfig(64, 128, 2, 4, 2, 16, 1e-6, 1e6)
    return ModelConfig(
        variant=variant,
        size_name=size_name,
        talker=stack,
        predictor=stack,
        text_vocab_size=1_000,
        text_hidden_size=64,
        talker_vocab_size=3_072,
        max_positions=32_768,
        codec_tokens=CodecTokens(2148, 2149, 2150, 2154, 2155, 2156, 2157),
        text_tokens=TextTokens(1, 2, 3, 4, 5, 6),
        language_ids={"chinese": 2055, "english": 2050, "sichuan_dialect": 2062},
        speaker_ids={} if variant != "custom_voice" else {"ryan": 3061, "uncle_fu": 3010},
        speaker_dialects={} if variant != "custom_voice" else {"uncle_fu": "sichuan_dialect"},
        codec=CodecDecoderConfig(32, 32, 32, 32, 32, 1, 2, 16, 1e-5, 1e4, 72, (8, 5, 4, 3), (2, 2)),
    )


def saw_tooth(first_frame: int, frames: int) -> bytes:
    """Return the PCM of a run of frames."""
    first = first_frame * SAMPLES_PER_FRAME
    samples = [(first + i) % 30_000 for i in range(frames * SAMPLES_PER_FRAME)]
    return struct.pack(f"<{len(samples)}h", *samples)


def frame_codes(frames: int) -> list[list[int]]:
    """Return the codes of the first frames."""
    return [[(16 * k + g) % 2048 for g in range(16)] for k in range(frames)]


@dataclass
class Script:
    """What the next requests do.

    ``chunks`` are frame counts; ``endless`` repeats the last one forever; ``hang_at`` and ``fail_at`` stop before the
    chunk of that index for good, or with ``failure``; ``truncate`` ends the stream without its last chunk.
    """

    chunks: tuple[int, ...] = (1, 2, 4)
    finish_reason: FinishReason = FinishReason.STOP
    endless: bool = False
    delay_s: float = 0.0
    hang_at: int | None = None
    fail_at: int | None = None
    failure: Exception | None = None
    truncate: bool = False
    submit_failure: Exception | None = None


class FakeStream:
    """One scripted request."""

    def __init__(self, service: FakeService, request: SpeechRequest, request_id: str, include_codes: bool) -> None:
        self.request, self.request_id, self.include_codes = request, request_id, include_codes
        self.outcome: SpeechOutcome | None = None
        self.closes = 0
        self.produced_frames = 0
        self._service, self._script = service, service.script

    async def __aiter__(self) -> AsyncIterator[AudioChunk]:
        script = self._script
        index = 0
        while script.endless or index < len(script.chunks):
            await asyncio.sleep(script.delay_s)
            if index == script.hang_at:
                await asyncio.Event().wait()
            if index == script.fail_at:
                assert script.failure is not None
                raise script.failure
            frames = script.chunks[min(index, len(script.chunks) - 1)]
            last = not script.endless and not script.truncate and index == len(script.chunks) - 1
            pcm = saw_tooth(self.produced_frames, frames)
            self.produced_frames += frames
            if last:
                self._end()
            yield AudioChunk(pcm=pcm, frames=frames, total_frames=self.produced_frames, last=last)
            index += 1

    def _end(self) -> None:
        codes = b"".join(struct.pack("<16h", *frame) for frame in frame_codes(self.produced_frames))
        self.outcome = SpeechOutcome(
            request_id=self.request_id,
            finish_reason=self._script.finish_reason,
            frames=self.produced_frames,
            prompt_rows=PROMPT_ROWS,
            seed=self.request.sampling.seed,
            codes=codes if self.include_codes else b"",
        )
        self._service.outcomes[self.request_id] = self.outcome

    async def aclose(self) -> None:
        await asyncio.sleep(0)  # a close that is cancelled half-way does not count
        self.closes += 1


@dataclass
class FakeService:
    """Starts a FakeStream per request."""

    config: ModelConfig = field(default_factory=model_config)
    settings: Settings = field(default_factory=Settings)
    script: Script = field(default_factory=Script)
    streams: list[FakeStream] = field(default_factory=list)
    outcomes: dict[str, SpeechOutcome] = field(default_factory=dict)
    voice_fingerprint: str = "f1"
    encoded: list[tuple[int, bool]] = field(default_factory=list)  # samples and whether codes were wanted
    health_failure: Exception | None = None

    async def submit(self, request: SpeechRequest, *, include_codes: bool = False) -> FakeStream:
        if self.script.submit_failure is not None:
            raise self.script.submit_failure
        stream = FakeStream(self, request, f"speech-{len(self.streams)}", include_codes)
        self.streams.append(stream)
        return stream

    async def encode_voice(self, samples: NDArray[np.float32], *, with_codes: bool) -> EncodedVoice:
        """The embedding is the recording's loudest sample, each code the number of the recording."""
        await asyncio.sleep(0.01)
        self.encoded.append((len(samples), with_codes))
        embedding = np.full(self.config.talker.hidden_size, np.abs(samples).max(), "<f4").tobytes()
        frames = -(-len(samples) // SAMPLES_PER_FRAME)
        codes = np.full((frames, 16), len(self.encoded), "<i2").tobytes()
        return EncodedVoice(embedding, codes if with_codes else b"")

    def outcome(self, request_id: str) -> SpeechOutcome | None:
        return self.outcomes.get(request_id)

    async def health(self) -> dict[str, Any]:
        if self.health_failure is not None:
            raise self.health_failure
        return {"device": "fake", "graphs": "off"}

    async def stats(self) -> dict[str, Any]:
        return {"requests": len(self.streams)}
