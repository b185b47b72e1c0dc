"""From what a request says about its voice to the voice: reference audio, an embedding, or a registered name.

Audio is decoded and cleaned up in threads and encoded by the service; what came in with a request is kept by content,
so that the same reference is neither decoded nor encoded twice, even when it arrives many times at once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen3tts_hw.engine.service import SpeechService
from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.prompt.request import check_cloning, check_reference_text
from qwen3tts_hw.serving.schemas import SpeechBody, voice_name
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import ClonedVoice, EncodedVoice
from qwen3tts_hw.voice.audio_input import ReferenceAudio, decode_reference, load_reference
from qwen3tts_hw.voice.cleanup import CleanupOptions, advice, clean_up
from qwen3tts_hw.voice.registry import VoiceRegistry
from qwen3tts_hw.voice.voice_file import check_embedding

CLONE_FIELDS = (
    "ref_audio",
    "ref_text",
    "x_vector_only_mode",
    "speaker_embedding",
    "trim_silence",
    "normalize_loudness",
    "trailing_silence_ms",
)
VOICES_KEPT = 1_024
DECODED_AT_ONCE = 2  # decoding is quick, but each may take tens of megabytes
_ADDRESSES = ("http:", "https:", "file:")


@dataclass(frozen=True, slots=True, eq=False)
class HeardVoice:
    """Encoded reference audio, the samples that were encoded, and what to tell whoever recorded it."""

    encoded: EncodedVoice
    samples: NDArray[np.float32]
    advice: tuple[str, ...]


class VoiceCloning:
    """Voices for one service. Lives on one event loop."""

    def __init__(self, service: SpeechService) -> None:
        self.config, self.settings, self._service = service.config, service.settings, service
        self.registry = VoiceRegistry.from_settings(
            service.settings,
            width=service.config.talker.hidden_size,
            fingerprint=service.voice_fingerprint,
            reserved=service.config.speakers,
        )
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)
        self._heard: OrderedDict[bytes, asyncio.Task[EncodedVoice]] = OrderedDict()

    async def voice_for(self, body: SpeechBody) -> str | ClonedVoice | None:
        """The voice of a request: a preset's name, a cloned voice, or None. Raises RequestError naming the field."""
        name = voice_name(body, self.config)
        if self.config.variant != "base":
            for field in CLONE_FIELDS:
                if getattr(body, field) not in (None, False):
                    check_cloning(self.config, field)
            return name
        sources = [field for field in ("ref_audio", "speaker_embedding") if getattr(body, field) is not None] + [
            "voice"
        ] * (name is not None)
        if len(sources) > 1:
            raise RequestError(sources[0], f"{' and '.join(sources)} contradict each other; give one of them")
        if body.ref_audio is not None:
            return await self._from_audio(body, body.ref_audio)
        if body.ref_text is not None:
            raise RequestError("ref_text", "ref_text is what is said in ref_audio, which is missing")
        if body.speaker_embedding is not None:
            return ClonedVoice(check_embedding(body.speaker_embedding, self.config.talker.hidden_size))
        if name is None:
            return None  # refused, with what would work, when the request is built
        voice = await asyncio.to_thread(self.registry.load, name)
        return ClonedVoice(voice.embedding) if body.x_vector_only_mode else voice

    async def hear(self, audio: str | bytes, options: CleanupOptions, *, with_codes: bool) -> HeardVoice:
        """Decode, clean up and encode reference audio: an audio file's bytes, or what ``ref_audio`` may be."""
        check_cloning(self.config, "ref_audio")
        async with self._decoding:
            reference, samples = await asyncio.to_thread(_prepared, audio, options, self.settings)
        encoded = await self._service.encode_voice(samples, with_codes=with_codes)
        return HeardVoice(encoded, samples, advice(reference))

    async def _from_audio(self, body: SpeechBody, audio: str) -> ClonedVoice:
        with_codes = not body.x_vector_only_mode
        text = check_reference_text(body.ref_text, self.settings) if with_codes else ""
        options = CleanupOptions.from_settings(
            self.settings,
            trim=body.trim_silence,
            loudness=body.normalize_loudness,
            silence_ms=body.trailing_silence_ms,
        )
        encoded = await self._heard_once(audio, options, with_codes=with_codes)
        return ClonedVoice(encoded.embedding, text, encoded.codes if with_codes else b"")

    async def _heard_once(self, audio: str, options: CleanupOptions, *, with_codes: bool) -> EncodedVoice:
        """What is heard in audio, from memory where it can be; what an address holds may change, so never there."""
        if audio.lstrip().lower().startswith(_ADDRESSES):
            return (await self.hear(audio, options, with_codes=with_codes)).encoded
        key = hashlib.sha256(f"{options} {with_codes} {audio}".encode()).digest()
        task = self._heard.get(key)
        if task is None:
            task = asyncio.create_task(self._encoded(audio, options, with_codes))
            self._heard[key] = task
            task.add_done_callback(lambda done: self._forget_failure(key, done))
            while len(self._heard) > VOICES_KEPT:
                self._heard.popitem(last=False)
        else:
            self._heard.move_to_end(key)
        return await asyncio.shield(task)  # others may wait for it, too

    async def _encoded(self, audio: str, options: CleanupOptions, with_codes: bool) -> EncodedVoice:
        return (await self.hear(audio, options, with_codes=with_codes)).encoded

    def _forget_failure(self, key: bytes, task: asyncio.Task[EncodedVoice]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._heard.get(key) is task:
            del self._heard[key]


def _prepared(
    audio: str | bytes, options: CleanupOptions, settings: Settings
) -> tuple[ReferenceAudio, NDArray[np.float32]]:
    """Decode and clean up; blocks."""
    load = load_reference(audio, settings) if isinstance(audio, str) else decode_reference(audio, settings)
    return load, clean_up(load.samples, options)
