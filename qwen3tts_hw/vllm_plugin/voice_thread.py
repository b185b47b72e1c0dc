"""Reference audio is encoded in a thread and a device stream of its own, so that the engine goes on making frames.

Knows recordings and tickets. One recording is encoded at a time; a bounded number wait. Whatever happens to a recording
is sent to its ticket as an answer, for ``unpack_encoding``.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qwen3tts_hw.backends import Backend
from qwen3tts_hw.engine.voice_encoder import VoiceEncoder
from qwen3tts_hw.errors import CapacityError, RequestError
from qwen3tts_hw.vllm_plugin.payload import Ticket, pack_encoding

logger = logging.getLogger(__name__)

RECORDINGS_OPEN = 32  # each as large as ref_audio_max_seconds allows, 6 MB by default


@dataclass(frozen=True, slots=True)
class Recording:
    """Mono audio at 24 kHz, float32 in bytes; whether its codes are wanted; where the answer goes."""

    samples: bytes
    with_codes: bool
    ticket: Ticket


class AnswerBox(Protocol):
    """Where answers leave."""

    def answer(self, ticket: Ticket, answer: bytes) -> None:
        """Send an answer to whoever waits for it."""

    def close(self) -> None:
        """Send no more."""


class VoiceThread:
    """Encodes recordings one after the other; ``add`` is called from the engine's thread.

    ``outbox`` is used, and closed at the end, by the thread alone.
    """

    def __init__(self, encoder: VoiceEncoder, backend: Backend, outbox: AnswerBox) -> None:
        self._encoder, self._backend = encoder, backend
        self._stream = backend.new_stream(priority="low")
        self._recordings: queue.Queue[Recording | None] = queue.Queue()
        self._outbox = outbox
        self._closing = False
        self._added = 0  # written by the engine's thread
        self._answered = 0  # written by the thread of its own
        self._thread = threading.Thread(target=self._answer_all, name="qwen3tts-voices", daemon=True)
        self._thread.start()

    @property
    def open_recordings(self) -> int:
        """Number of recordings that wait or are being encoded."""
        return self._added - self._answered

    def add(self, recording: Recording) -> CapacityError | None:
        """Have a recording encoded; the error says that too many wait already."""
        if self.open_recordings >= RECORDINGS_OPEN:
            return CapacityError(f"{RECORDINGS_OPEN} recordings wait to be encoded; try again later")
        self._added += 1
        self._recordings.put(recording)
        return None

    def shut_down(self, timeout_s: float = 5.0) -> None:
        """Finish what is being encoded; what waits is dropped."""
        self._closing = True
        self._recordings.put(None)
        self._thread.join(timeout_s)

    def _answer_all(self) -> None:
        """Body of the thread."""
        with self._backend.on_stream(self._stream):  # which makes its device this thread's, too
            while (recording := self._recordings.get()) is not None and not self._closing:
                self._outbox.answer(recording.ticket, self._answer(recording))
                self._answered += 1
        self._outbox.close()

    def _answer(self, recording: Recording) -> bytes:
        samples = np.frombuffer(recording.samples, dtype="<f4")
        try:
            return pack_encoding(self._encoder.encode(samples, with_codes=recording.with_codes))
        except RequestError as error:
            return pack_encoding(error)
        except Exception as error:  # thread boundary: logged here, raised where the answer is waited for
            logger.exception("reference audio could not be encoded")
            return pack_encoding(RuntimeError(f"{type(error).__name__}: {error}"))
