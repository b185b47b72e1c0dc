"""The speech service over vLLM's async engine: one per API-server process.

A request is a prompt of placeholder ids plus our payload; vLLM schedules it and reports only its end, the audio arrives
through the hub. A stream is over when the worker's last packet and vLLM's final output are both here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.engine.audio import Packet
from qwen3tts_hw.engine.state import Admission
from qwen3tts_hw.errors import CapacityError, GenerationError, RequestError
from qwen3tts_hw.prompt.layout import build_layout
from qwen3tts_hw.prompt.request import SpeechRequest
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import AudioChunk, ClonedVoice, EncodedVoice, FinishReason, SpeechOutcome
from qwen3tts_hw.vllm_plugin.payload import EXTRA_ARGS_KEY, pack, unpack_encoding
from qwen3tts_hw.vllm_plugin.transport import AudioHub, Inbox, Question

logger = logging.getLogger(__name__)

_OUTCOMES_KEPT = 1000
_OUTCOME_CODE_BYTES = 16 << 20  # codes kept with them
_ENGINE_CHECK_S = 0.5  # how often a waiting request asks whether the engine still runs
ENCODED_AT_ONCE = 4  # recordings of this process that workers hold; they encode one after the other
TAIL_TIMEOUT_S = 30.0  # after the engine's final output, how long the last audio may take


class VllmSpeechStream:
    """A running request; see :class:`qwen3tts_hw.engine.service.SpeechStream`."""

    def __init__(
        self,
        service: VllmSpeechService,
        request_id: str,
        inbox: Inbox,
        engine_task: asyncio.Task[str],
        details: Details,
    ) -> None:
        self._service, self._inbox, self._engine_task, self._details = service, inbox, engine_task, details
        self._request_id = request_id
        self._outcome: SpeechOutcome | None = None
        self._closed = False

    @property
    def request_id(self) -> str:
        """Identifier of the request."""
        return self._request_id

    @property
    def outcome(self) -> SpeechOutcome | None:
        """How the request ended, once it has."""
        return self._outcome

    async def __aiter__(self) -> AsyncIterator[AudioChunk]:
        """Yield chunks until the last; close the stream in any case."""
        frames, codes = 0, bytearray()
        try:
            while True:
                packet = await self._next_packet()
                frames += packet.frames
                codes += packet.codes
                if packet.last:
                    self._finish(await self._finish_reason(), frames, bytes(codes))
                yield AudioChunk(packet.pcm, packet.frames, frames, packet.last, packet.codes)
                if packet.last:
                    return
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Abort the request if it runs, forget its inbox."""
        if self._closed:
            return
        self._closed = True
        self._service.hub.close(self._inbox)
        self._service.forget(self)
        if not self._engine_task.done():
            self._engine_task.cancel()  # vLLM turns the cancelled iteration into an abort
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._engine_task
        elif not self._engine_task.cancelled():
            self._engine_task.exception()  # retrieved, so that asyncio does not warn

    async def _next_packet(self) -> Packet:
        """The next packet; fails as soon as the engine fails, the client lags too far, or the tail never comes."""
        getter = asyncio.ensure_future(self._inbox.get())
        try:
            if not self._engine_task.done():
                await self._wait_for_any(getter, self._engine_task)
            if self._engine_task.done() and not getter.done():
                self._raise_engine_error()
                await asyncio.wait({getter}, timeout=self._service.tail_timeout_s)
            if not getter.done():
                raise GenerationError(f"request {self.request_id}: its last audio did not arrive")
            packet = getter.result()
        finally:
            if not getter.done():
                getter.cancel()
        if packet is None:
            raise GenerationError(f"request {self.request_id}: {self._inbox.failure}")
        return packet

    async def _finish_reason(self) -> str:
        """Why the engine says the request ended; its final output may come after the last audio."""
        await self._wait_for_any(self._engine_task)
        self._raise_engine_error()
        return self._engine_task.result()

    async def _wait_for_any(self, *futures: asyncio.Future[Any]) -> None:
        """Wait until one is done; fail once the engine has stopped: a server that shuts down does not tell requests."""
        while not (await asyncio.wait(futures, timeout=_ENGINE_CHECK_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            if self._service.engine_stopped:
                raise GenerationError(f"the engine has stopped while request {self.request_id} was running")

    def _raise_engine_error(self) -> None:
        if self._engine_task.cancelled():
            raise GenerationError(f"request {self.request_id} was cancelled")
        error = self._engine_task.exception()
        if error is not None:
            raise GenerationError(f"the engine failed while request {self.request_id} was running: {error}") from error

    def _finish(self, reason: str, frames: int, codes: bytes) -> None:
        self._outcome = SpeechOutcome(
            request_id=self.request_id,
            finish_reason=FinishReason(reason) if reason in ("stop", "length") else FinishReason.ABORT,
            frames=frames,
            prompt_rows=self._details[0],
            seed=self._details[1],
            codes=codes,
        )
        self._service.remember(self._outcome)


Details = tuple[int, int]  # prompt rows, seed


class VllmSpeechService:
    """Submit requests to vLLM's engine client; see :class:`qwen3tts_hw.engine.service.SpeechService`."""

    def __init__(
        self,
        engine: Any,
        config: ModelConfig,
        tokenizer: TextTokenizer,
        settings: Settings,
        *,
        max_rows: int,
        voice_fingerprint: str = "",
        tail_timeout_s: float = TAIL_TIMEOUT_S,
    ) -> None:
        self.config, self.settings, self.tail_timeout_s = config, settings, tail_timeout_s
        self.voice_fingerprint = voice_fingerprint
        self.hub = AudioHub(host=settings.audio_host, limit_bytes=settings.max_queue_bytes)
        self._engine, self._tokenizer, self._max_rows = engine, tokenizer, max_rows
        self._running: set[VllmSpeechStream] = set()
        self._outcomes: OrderedDict[str, SpeechOutcome] = OrderedDict()
        self._outcome_bytes = 0
        self._facts: list[dict[str, Any]] | None = None  # asked for once
        self._submitted = 0
        self._encoding = asyncio.Semaphore(ENCODED_AT_ONCE)

    async def submit(self, request: SpeechRequest, *, include_codes: bool = False) -> VllmSpeechStream:
        """Start a request on the engine."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if len(self._running) >= self.settings.max_queued_requests:
            raise CapacityError(
                f"{len(self._running)} requests are running or waiting (setting max_queued_requests); try again later"
            )
        layout = build_layout(self.config, self._tokenizer, request)
        room = self._max_rows - layout.length
        if room < 1:
            raise RequestError(
                "input",
                f"the prompt takes {layout.length} positions of {self._max_rows}; shorten the text, the instructions "
                "or the reference audio, or start the server with a larger --max-model-len",
            )
        max_frames = min(request.max_frames, room)
        voice = request.voice if isinstance(request.voice, ClonedVoice) else None
        admission = Admission(layout, request.sampling, max_frames, voice)
        self.hub.start()
        inbox = self.hub.open()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_frames,
            stop_token_ids=[self.config.codec_tokens.eos],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
            extra_args={EXTRA_ARGS_KEY: pack(admission, inbox.ticket, codes=include_codes)},
        )
        request_id = f"speech-{uuid.uuid4().hex}"
        placeholder = [self.config.codec_tokens.pad] * layout.length
        task = asyncio.create_task(self._run(placeholder, params, request_id), name=request_id)
        stream = VllmSpeechStream(self, request_id, inbox, task, (layout.length, request.sampling.seed))
        self._running.add(stream)
        self._submitted += 1
        return stream

    async def encode_voice(self, samples: NDArray[np.float32], *, with_codes: bool) -> EncodedVoice:
        """Have reference audio encoded by the workers, which go on with their steps meanwhile.

        With several engines all of them encode it and know it then; the first answer counts.
        """
        async with self._encoding:
            self.hub.start()
            question = self.hub.ask()
            ticket, raw = question.ticket, samples.astype("<f4").tobytes()
            try:
                arguments = (raw, with_codes, ticket.address, ticket.key)
                begun = await self._engine.collective_rpc("qwen3tts_encode_voice", args=arguments)
                answer = next((refusal for refusal in begun if refusal), b"") or await self._answer(question)
            finally:
                self.hub.forget(question)
        return unpack_encoding(answer)

    async def _answer(self, question: Question) -> bytes:
        """Wait for a worker's answer; fail once the engine has stopped."""
        while not (await asyncio.wait({question.answer}, timeout=_ENGINE_CHECK_S))[0]:
            if self.engine_stopped:
                raise GenerationError("the engine has stopped while reference audio was encoded")
        return question.answer.result()

    def outcome(self, request_id: str) -> SpeechOutcome | None:
        """How a recent request of this process ended."""
        return self._outcomes.get(request_id)

    def remember(self, outcome: SpeechOutcome) -> None:
        """Keep an outcome for later questions; the oldest is dropped."""
        self._outcomes[outcome.request_id] = outcome
        self._outcome_bytes += len(outcome.codes)
        while len(self._outcomes) > _OUTCOMES_KEPT or self._outcome_bytes > _OUTCOME_CODE_BYTES:
            self._outcome_bytes -= len(self._outcomes.popitem(last=False)[1].codes)

    def forget(self, stream: VllmSpeechStream) -> None:
        """A stream has been closed."""
        self._running.discard(stream)

    @property
    def engine_stopped(self) -> bool:
        """Whether the engine has failed or been shut down."""
        return bool(self._engine.errored)

    async def health(self) -> dict[str, Any]:
        """Raise if the engine is dead; else say what this server is."""
        await self._engine.check_health()
        if self._facts is None:
            self._facts = [json.loads(one) for one in await self._engine.collective_rpc("qwen3tts_facts")]
        return {
            "variant": self.config.variant,
            "size": self.config.size_name,
            "running": len(self._running),
            "settings": self.settings.as_dict(),
            "workers": self._facts,
        }

    async def stats(self) -> dict[str, Any]:
        """Counters of this process and of every worker."""
        return {
            "pid": os.getpid(),
            "submitted": self._submitted,
            "running": len(self._running),
            "inboxes_open": self.hub.open_inboxes,
            "orphan_packets": self.hub.orphans,
            "outcomes_kept": len(self._outcomes),
            "workers": [json.loads(one) for one in await self._engine.collective_rpc("qwen3tts_stats")],
        }

    async def trace(self, request_id: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Hidden states ``[T, H]`` of a traced request (setting ``trace``)."""
        parts = await self._engine.collective_rpc("qwen3tts_trace", args=(request_id,))
        raw = next((part for part in parts if part), b"")
        return np.frombuffer(raw, dtype=np.float32).reshape(-1, self.config.talker.hidden_size)

    async def shut_down(self) -> None:
        """Abort what runs and close the hub."""
        for stream in list(self._running):
            await stream.aclose()
        await self.hub.shut_down()

    async def _run(self, prompt: list[int], params: Any, request_id: str) -> str:
        """Iterate the engine to the end; returns its finish reason."""
        reason = "abort"
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, request_id):
            if output.finished:
                reason = output.outputs[0].finish_reason or "abort"
        return reason
