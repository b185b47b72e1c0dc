"""The mixin over vLLM's V1 model runner: five hooks that map its rows to slots. No step logic lives here.

The hooks have the same meaning from vLLM 0.23 to 0.33 and in vllm-ascend 0.23; where signatures differ, arguments are
passed on as they come. With asynchronous scheduling the host's tokens are placeholders: nothing here reads them.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from qwen3tts_hw.engine.copies import to_device
from qwen3tts_hw.engine.speech_engine import SpeechEngine, StepRows
from qwen3tts_hw.vllm_plugin.assembly import build_engine
from qwen3tts_hw.vllm_plugin.payload import unpack
from qwen3tts_hw.vllm_plugin.transport import AudioOutbox


class SpeechRunnerMixin:
    """Speech hooks; precedes the platform's runner in the MRO."""

    input_batch: Any
    execute_model_state: Any
    speech: SpeechEngine | None = None
    _outbox: AudioOutbox | None = None
    _scheduled: Any = None
    _rows: StepRows | None = None
    _sample_hidden: Any = None
    _preempted = 0
    _steps = 0

    def build_speech(self) -> None:
        """Allocate slots, codec state and the audio path; called once, after the weights are loaded."""
        model = self._speech_model()
        self._outbox = AudioOutbox()
        self.speech = build_engine(model.parts, model.table, self._outbox)

    def capture_speech(self) -> None:
        """Capture what runs outside vLLM's own graphs; called once, before the first request."""
        if self.speech is not None:
            self.speech.frame.capture()

    def close_speech(self) -> None:
        """Send what is queued and close the audio path; safe to call twice."""
        if self.speech is not None and self._outbox is not None:
            self.speech.pump.shut_down()
            self._outbox.close()
        self.speech = self._outbox = None

    def speech_stats(self) -> dict[str, Any]:
        """Counters for operators and tests."""
        if self.speech is None or self._outbox is None:
            return {}
        parts = self._speech_model().parts
        return {
            "pid": os.getpid(),
            "slots": self.speech.table.num_slots,
            "slots_free": self.speech.table.free_slots,
            "requests_open": self.speech.open_requests,
            "admitted": self.speech.admitted,
            "finished": self.speech.finished,
            "preempted": self._preempted,
            "steps": self._steps,
            "streams_open": self.speech.pump.open_streams,
            "chunks_queued": self.speech.pump.queued_jobs,
            "packets_sent": self._outbox.sent,
            "packets_dropped": self._outbox.dropped,
            "tickets_open": self._outbox.open_tickets,
            "rss_bytes": _resident_bytes(),
            "device": parts.backend.describe(),
            "frame_step": {"mode": self.speech.frame.mode, **self.speech.frame.counters},
            "attention_op": parts.attention_name,
            "talker_dtype": str(parts.dtype).removeprefix("torch."),
            "codec_dtype": parts.settings.codec_dtype,
        }

    def speech_trace(self, request_id: str) -> bytes:
        """Hidden states of a traced request."""
        return self.speech.trace(request_id) if self.speech is not None else b""

    def _update_states(self, scheduler_output: Any) -> Any:
        """Requests come and go: free slots of finished ones first, then admit the new."""
        if self.speech is None or self._outbox is None:
            return super()._update_states(scheduler_output)  # type: ignore[misc]  # the runner follows in the MRO
        for request_id in scheduler_output.finished_req_ids:
            self.speech.finish(request_id)
        result = super()._update_states(scheduler_output)  # type: ignore[misc]  # as above
        for new in scheduler_output.scheduled_new_reqs:
            payload = unpack(new.sampling_params.extra_args if new.sampling_params else None)
            if payload is None:
                self.speech.admit(new.req_id, None)
                continue
            admission, ticket, with_codes = payload
            self._outbox.open(new.req_id, ticket)
            self.speech.admit(new.req_id, admission, with_codes=with_codes)
        self._preempted += len(scheduler_output.preempted_req_ids or ())
        self._scheduled = scheduler_output
        return result

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stage which slot each row belongs to, then run the talker."""
        if self._scheduled is not None and self.speech is not None:
            tokens = kwargs.get("input_ids")
            if tokens is None:
                tokens = next(value for value in args if torch.is_tensor(value))
            self._stage(tokens.shape[0])
        return super()._model_forward(*args, **kwargs)  # type: ignore[misc]  # as above

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """Profiling, capture and idle ranks: no row may touch a live slot."""
        model = self._speech_model()
        model.row_slots.fill_(model.table.scratch)
        return super()._dummy_run(*args, **kwargs)  # type: ignore[misc]  # as above

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the sampled rows' hidden states: the runner drops them before it calls ``_sample``."""
        state = self.execute_model_state
        self._sample_hidden = None if state is None else state.sample_hidden_states
        try:
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]  # as above
        finally:
            self._sample_hidden = None

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Make the frames; vLLM gets codebook 0's token of each."""
        from vllm.v1.outputs import SamplerOutput

        rows = self._rows
        if self.speech is None or rows is None or self._sample_hidden is None:
            return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]  # as above
        tokens = self.speech.step(self._sample_hidden, logits, rows)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32)[:, None], logprobs_tensors=None)

    def _stage(self, padded_rows: int) -> None:
        """Upload the row-to-slot map of this step and the (slot, position) of each request's last row."""
        assert self.speech is not None
        scheduled, batch = self._scheduled, self.input_batch
        self._scheduled = None
        self._steps += 1
        count = batch.num_reqs
        request_ids = batch.req_ids[:count]
        slots = self.speech.slots_of(request_ids)
        total = scheduled.total_num_scheduled_tokens
        if total == count:
            lengths = np.ones(count, dtype=np.int64)
        else:
            lengths = np.fromiter((scheduled.num_scheduled_tokens[name] for name in request_ids), np.int64, count)
        model = self._speech_model()
        row_slots = np.full(padded_rows, model.table.scratch, dtype=np.int64)
        row_slots[:total] = np.repeat(slots, lengths)
        model.row_slots[:padded_rows].copy_(to_device(model.parts.backend, torch.from_numpy(row_slots)))
        last = batch.num_computed_tokens_cpu[:count].astype(np.int64) + lengths - 1
        self._rows = self.speech.stage(slots, last)

    def _speech_model(self) -> Any:
        return self.get_model()  # type: ignore[attr-defined]  # every platform's runner has it


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # procfs, read per call
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
