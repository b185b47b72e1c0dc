"""What the local engine answers to the requests that the tests send to servers: codes, samples, finish reason.

Each request is computed once. Also owns the eight different requests that several tests send at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qwen3tts_hw.engine.local import LocalEngine, SpeechResult
from qwen3tts_hw.prompt.request import build_request
from qwen3tts_hw.settings import Settings
from tests.parity.checkpoints import TinyCheckpoint
from tests.plugin.answers import Speech, assert_equal_codes
from tests.plugin.server import speech_body

TOLERANCE = 1e-4  # of samples in -1..1
PCM_PEAK = 32_767
_HTTP_ONLY = ("response_format", "stream_format", "include_codes")
_TEXTS = (
    "Hello there.",
    "The quick brown fox jumps over the lazy dog, and nobody minds it in the least.",
    "Eins, zwei, drei.",
    "A somewhat longer text has more rows in its prompt than the others of this list, so that it takes more than one "
    "chunk to read.",
    "Yes?",
    "Once upon a time, far away, there was a voice.",
    "12:30, 7% and 3.14.",
    "The last of eight.",
)
_LANGUAGES = ("english", "auto", "german", "english", "french", "auto", "english", "japanese")
_VOICES = ("ryan", "vivian", "aiden", "serena", "ryan", "ono_anna", "sohee", "uncle_fu")


class LocalReference:
    """Local engines, one per checkpoint, and their answers."""

    def __init__(self, directory_of: Callable[[TinyCheckpoint], Path]) -> None:
        self._directory_of = directory_of
        self._engines: dict[TinyCheckpoint, LocalEngine] = {}
        self._answers: dict[tuple[TinyCheckpoint, str], SpeechResult] = {}

    def answer(self, checkpoint: TinyCheckpoint, fields: dict[str, Any]) -> SpeechResult:
        """Return the local answer to a request in its HTTP spelling."""
        body = speech_body(**fields)
        key = (checkpoint, repr(sorted(body.items())))
        if key not in self._answers:
            if checkpoint not in self._engines:
                directory = self._directory_of(checkpoint)
                self._engines[checkpoint] = LocalEngine.load(
                    directory, device="cpu", dtype="float32", settings=Settings()
                )
            engine = self._engines[checkpoint]
            renamed = {"input": "text", "instructions": "instruct"}
            values = {renamed.get(name, name): value for name, value in body.items() if name not in _HTTP_ONLY}
            self._answers[key] = engine.synthesize(build_request(engine.config, Settings(), **values))
        return self._answers[key]

    def assert_equal(self, found: Speech, checkpoint: TinyCheckpoint, fields: dict[str, Any]) -> None:
        """The server's answer has the local engine's codes, finish reason and samples."""
        expected = self.answer(checkpoint, fields)
        assert_equal_codes(found.codes, expected.codes, repr(fields["text"]))
        assert found.finish_reason == expected.finish_reason.value
        assert_close_samples(found, expected.pcm)


def assert_close_samples(found: Speech, expected: np.ndarray) -> None:
    """Samples agree with float samples, but for the half step that 16 bits cost."""
    assert found.pcm.shape == expected.shape
    worst = float(np.abs(found.pcm / PCM_PEAK - expected).max())
    assert worst <= TOLERANCE + 0.5 / PCM_PEAK


def eight_requests(checkpoint: TinyCheckpoint, *, seeded: bool) -> list[dict[str, Any]]:
    """Return eight different requests that the checkpoint can serve: texts, voices, modes, lengths, sampling."""
    found = []
    for index, text in enumerate(_TEXTS):
        fields: dict[str, Any] = {
            "text": text,
            "voice": _VOICES[index],
            "language": _LANGUAGES[index],
            "text_mode": "streaming" if index % 2 else "whole",
            "max_new_tokens": 14 + 3 * index,
        }
        if checkpoint.variant == "voice_design":
            fields |= {"voice": None, "instructions": f"A calm voice, number {index}."}
        elif checkpoint.size == "tiny" and index % 3 == 0:
            fields |= {"instructions": "Speak slowly."}
        if seeded:
            fields |= {"temperature": 0.5 + 0.1 * index, "seed": 1_000 + index, "top_k": (0, 20, 50)[index % 3]}
            fields |= {"top_p": 0.9 if index % 2 else 1.0, "repetition_penalty": 1.0 + 0.05 * index}
        found.append(fields)
    return found
