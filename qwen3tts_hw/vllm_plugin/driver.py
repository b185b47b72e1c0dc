"""What both runner generations do with a speech model: admit and finish requests, stage rows, make frames, count.

The V1 mixin (:mod:`.runner`) and the V2 model state (:mod:`.model_state`) translate their own batch types into these
calls. With asynchronous scheduling the host's tokens are placeholders: nothing here reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen3tts_hw.backends import Backend
from qwen3tts_hw.engine.copies import to_device
from qwen3tts_hw.engine.speech_engine import StepRows
from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.prompt.request import check_cloning
from qwen3tts_hw.settings import kernels_folder
from qwen3tts_hw.vllm_plugin.assembly import build_engine
from qwen3tts_hw.vllm_plugin.payload import pack_encoding, unpack
from qwen3tts_hw.vllm_plugin.transport import AudioOutbox
from qwen3tts_hw.vllm_plugin.voice_thread import Recording, VoiceThread


class SpeechDriver:
    """One worker's speech: the engine over the loaded model's slot table, and the way its audio leaves."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._outbox = AudioOutbox()
        self.engine = build_engine(model.parts, model.table, self._outbox)
        encoder, backend = model.parts.voice_encoder, model.parts.backend
        self._voices = None if encoder is None else VoiceThread(encoder, backend, AudioOutbox())
        self._kernels_folder = kernels_folder(model.parts.settings)  # now: vLLM changes the environment later
        self._rows: StepRows | None = None
        self.runner = ""
        self.preempted = 0
        self.steps = 0

    def capture(self) -> None:
        """Capture the frame step and the codec's steps; call once, before the first request."""
        self.engine.frame.capture()
        self.engine.pump.capture()

    def keeping_kernels(self) -> AbstractContextManager[None]:
        """Keep kernels that the block compiles, the platform's among them, where the next start finds them."""
        backend: Backend = self._model.parts.backend
        return backend.keeping_kernels(self._kernels_folder)

    def close(self) -> None:
        """Send what is queued and close the audio path."""
        if self._voices is not None:
            self._voices.shut_down()
        self.engine.pump.shut_down()
        self._outbox.close()

    def admit(self, request: Any) -> None:
        """Give a new request of vLLM's a slot; one that was preempted and comes back keeps what it has."""
        if self.engine.holds(request.req_id):
            return
        payload = unpack(request.sampling_params.extra_args if request.sampling_params else None)
        if payload is None:
            self.engine.admit(request.req_id, None)
            return
        admission, ticket, with_codes = payload
        self._outbox.open(request.req_id, ticket)
        self.engine.admit(request.req_id, admission, with_codes=with_codes)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Free the slots of finished and aborted requests after sending what is left of their audio."""
        self.engine.finish(*request_ids)

    def stage(self, request_ids: Sequence[str], lengths: np.ndarray, computed: np.ndarray, padded_rows: int) -> None:
        """Upload a step's row-to-slot map and the (slot, position) of each request's last row.

        ``lengths [B]`` rows are scheduled per request behind ``computed [B]`` rows; the batch is padded to
        ``padded_rows``.
        """
        model = self._model
        slots = self.engine.slots_of(request_ids)
        row_slots = np.full(padded_rows, model.table.scratch, dtype=np.int64)
        row_slots[: int(lengths.sum())] = np.repeat(slots, lengths)
        model.row_slots[:padded_rows].copy_(to_device(model.parts.backend, torch.from_numpy(row_slots)))
        self._rows = self.engine.stage(slots, computed.astype(np.int64) + lengths - 1)
        self.steps += 1

    def stage_nothing(self) -> None:
        """Dummy batches (profiling, capture, idle ranks): no row may touch a live slot."""
        self._model.row_slots.fill_(self._model.table.scratch)
        self._rows = None

    def sample(self, logits: Tensor) -> Tensor | None:
        """Make the frames of the staged rows; codebook 0's tokens ``[B, 1] int32``, or None if nothing is staged."""
        rows, hidden = self._rows, self._model.sampled_hidden
        if rows is None or hidden is None or len(rows.slots) != logits.shape[0]:
            return None
        self._rows = None
        return self.engine.step(hidden, logits, rows).to(torch.int32)[:, None]

    def encode_voice(self, recording: Recording) -> bytes:
        """Have reference audio encoded beside the engine's steps; an answer at once says why it will not be."""
        try:
            check_cloning(self._model.parts.config, "ref_audio")
        except RequestError as error:
            return pack_encoding(error)
        assert self._voices is not None
        refused = self._voices.add(recording)
        return b"" if refused is None else pack_encoding(refused)

    def facts(self) -> dict[str, Any]:
        """The chosen code paths, which do not change while the worker runs."""
        parts = self._model.parts
        return {
            "runner": self.runner,
            "device": parts.backend.describe(),
            "frame_step": self.engine.frame.mode,
            "attention_op": parts.attention_name,
            "predictor": parts.predictor.form,
            "talker_dtype": str(parts.dtype).removeprefix("torch."),
            "codec": parts.codec.form,
            "codec_device": str(parts.codec_backend.device),
            "codec_step": self.engine.pump.mode,
            "codec_dtype": parts.settings.codec_dtype,
            "kernels_folder": self._kernels_folder,
        }

    def stats(self) -> dict[str, Any]:
        """Counters for operators and tests."""
        engine, encoder = self.engine, self._model.parts.voice_encoder
        return {
            "pid": os.getpid(),
            "runner": self.runner,
            "slots": engine.table.num_slots,
            "slots_free": engine.table.free_slots,
            "requests_open": engine.open_requests,
            "admitted": engine.admitted,
            "finished": engine.finished,
            "preempted": self.preempted,
            "steps": self.steps,
            "streams_open": engine.pump.open_streams,
            "chunks_queued": engine.pump.queued_jobs,
            "packets_sent": self._outbox.sent,
            "packets_dropped": self._outbox.dropped,
            "tickets_open": self._outbox.open_tickets,
            "voices_encoded": 0 if encoder is None else encoder.encoded,
            "voices_open": 0 if self._voices is None else self._voices.open_recordings,
            "voices_reused": 0 if encoder is None else encoder.reused,
            "references": dict(engine.pump.references),
            "rss_bytes": _resident_bytes(),
            "free_device_bytes": self._model.parts.backend.free_bytes(),
            "frame_step": {"mode": engine.frame.mode, **engine.frame.counters},
            "codec_step": {"mode": engine.pump.mode, **engine.pump.counters},
        }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
