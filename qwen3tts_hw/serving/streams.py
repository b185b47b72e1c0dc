"""One speech request on the wire: its stream is owned here, read, framed, and closed exactly once.

Whatever ends a request (its last chunk, a failure, a client that left, a cancelled task), :class:`SpeechRun` closes
the engine's stream. A streamed answer that cannot be completed is cut off, not ended, so that the client sees it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qwen3tts_hw.engine.service import SpeechStream
from qwen3tts_hw.errors import GenerationError
from qwen3tts_hw.serving.errors import as_http_error, error_object, log_failure
from qwen3tts_hw.serving.schemas import outcome_object
from qwen3tts_hw.serving.wav import wav_header
from qwen3tts_hw.types import AudioChunk, FinishReason, SpeechOutcome

logger = logging.getLogger(__name__)

AUDIO_MEDIA_TYPES = {"wav": "audio/wav", "pcm": "audio/pcm"}
_T = TypeVar("_T")


class SpeechRun:
    """Owns the stream of one submitted request until :meth:`close`."""

    def __init__(self, stream: SpeechStream) -> None:
        self.request_id = stream.request_id
        self.outcome: SpeechOutcome | None = None
        self._stream = stream
        self._chunks = aiter(stream)
        self._closed = False

    async def next_chunk(self) -> AudioChunk | None:
        """Return the next chunk, None after the last; raise GenerationError if the audio will not be complete."""
        if self.outcome is not None:
            return None
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            raise GenerationError("the audio ended before its last chunk") from None
        if chunk.last:
            self.outcome = self._stream.outcome
            if self.outcome is None:
                raise GenerationError("the audio ended without an outcome")
            if self.outcome.finish_reason is FinishReason.ABORT:
                raise GenerationError("the request was aborted")
        return chunk

    async def collect(self) -> bytes:
        """Return the PCM of all chunks."""
        parts = []
        while (chunk := await self.next_chunk()) is not None:
            parts.append(chunk.pcm)
        return b"".join(parts)

    async def close(self) -> None:
        """Close the stream, once, even while this task is being cancelled."""
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            try:
                await self._stream.aclose()
            except Exception:
                logger.exception("closing request %s failed", self.request_id)


class AudioFraming:
    """Chunks as bytes of a chunked body: raw PCM, or PCM behind a WAV header of unknown size."""

    def __init__(self, audio_format: str) -> None:
        self.media_type = AUDIO_MEDIA_TYPES[audio_format]
        self._pending = wav_header() if audio_format == "wav" else b""

    def chunk(self, chunk: AudioChunk) -> bytes:
        """Frame one chunk; the first carries the header."""
        framed, self._pending = self._pending + chunk.pcm, b""
        return framed

    def end(self, outcome: SpeechOutcome) -> bytes:
        """Return what follows the last chunk."""
        return b""

    def failure(self, error: Exception) -> bytes | None:
        """Return how the client is told of a failure; None if the body can only be cut off."""
        return None


class EventFraming:
    """Chunks as server-sent events, data lines only, as OpenAI sends them.

    The ``audio`` of all ``speech.audio.delta`` events together is the file that a chunked body would be.
    """

    media_type = "text/event-stream"

    def __init__(self, audio_format: str) -> None:
        self._audio = AudioFraming(audio_format)

    def chunk(self, chunk: AudioChunk) -> bytes:
        """Frame one chunk as a delta event, nothing if it is empty."""
        audio = self._audio.chunk(chunk)
        if not audio:
            return b""
        return _event({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode("ascii")})

    def end(self, outcome: SpeechOutcome) -> bytes:
        """Return the done event with the outcome."""
        told = outcome_object(outcome)
        usage = {
            "input_tokens": outcome.prompt_rows,
            "output_tokens": outcome.frames,
            "total_tokens": outcome.prompt_rows + outcome.frames,
        }
        return _event({"type": "speech.audio.done", **told, "usage": usage})

    def failure(self, error: Exception) -> bytes | None:
        """Return an error event, which OpenAI's client raises."""
        return _event({"type": "error", **error_object(as_http_error(error))})


class SpeechStreamResponse(Response):
    """Sends a run as it is made, from a first chunk that is already there, and closes it however that ends.

    Not a StreamingResponse: that one leaves a suspended generator to the garbage collector when a send is cancelled,
    and whether it watches for the client's leaving depends on the server's ASGI version. Limit: behind a function added
    with Starlette's ``@app.middleware("http")``, a body that was cut off ends as if complete; the outcome route knows.
    """

    def __init__(
        self,
        run: SpeechRun,
        first: AudioChunk,
        framing: AudioFraming | EventFraming,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers=dict(headers), media_type=framing.media_type)
        del self.headers["content-length"]
        self._run, self._first, self._framing = run, first, framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; returns early, without an error, when the client has left."""
        try:
            await while_connected(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            logger.debug("the client of request %s left", self._run.request_id)
        finally:
            await self._run.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            chunk: AudioChunk | None = self._first
            while chunk is not None:
                await _send_part(send, self._framing.chunk(chunk))
                chunk = await self._run.next_chunk()
            outcome = self._run.outcome
            assert outcome is not None
            await _send_part(send, self._framing.end(outcome))
        except OSError:  # from a send: the client has left
            raise
        except Exception as error:
            log_failure(error, where=f"request {self._run.request_id}")
            told = self._framing.failure(error)
            if told is None:
                raise
            await _send_part(send, told)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` until it is done or the client leaves; then cancel it and raise ClientDisconnect.

    The request's body must have been read, so that ``receive`` has nothing but the disconnect left to tell.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for running in (task, watcher):
            running.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_part(send: Send, part: bytes) -> None:
    if part:
        await send({"type": "http.response.body", "body": part, "more_body": True})


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"
