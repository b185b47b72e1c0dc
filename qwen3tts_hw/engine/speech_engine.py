"""One worker's speech state: which request owns which slot, the frame step, and the audio pump behind it.

The thin drivers over it (vLLM's runners, the local engine) map their rows to slots and call :meth:`SpeechEngine.step`;
no step logic lives in them. All methods are called from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qwen3tts_hw.backends import Backend
from qwen3tts_hw.engine.audio import AudioPump
from qwen3tts_hw.engine.copies import to_device
from qwen3tts_hw.engine.state import Admission, SlotTable
from qwen3tts_hw.graph_wrappers import GraphWrapper

_TRACES_KEPT = 64


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows a step samples: one per request, host and device copies of (slot, position)."""

    slots: np.ndarray  # [B] int64
    positions: np.ndarray  # [B] int64
    device: Tensor  # [2, B] int64


class SpeechEngine:
    """Slots, frame step and audio of one worker.

    ``frame`` is the :class:`~qwen3tts_hw.engine.frame_step.FrameStep` in its graph wrapper.
    """

    def __init__(
        self, table: SlotTable, frame: GraphWrapper, pump: AudioPump, backend: Backend, *, trace: bool = False
    ) -> None:
        self.table, self.frame, self.pump, self._backend = table, frame, pump, backend
        self._slots: dict[str, int] = {}
        self._order: Sequence[str] = ()
        self._order_slots = np.zeros(0, dtype=np.int64)
        self._trace: dict[str, list[Tensor]] | None = {} if trace else None
        self.admitted = 0
        self.finished = 0

    @property
    def open_requests(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._slots)

    def holds(self, request_id: str) -> bool:
        """Whether a request has a slot."""
        return request_id in self._slots

    def admit(self, request_id: str, admission: Admission | None, *, with_codes: bool = False) -> int:
        """Give a request a slot. ``admission`` None is a request without speech: it will end at once."""
        slot = self.table.take()
        self._slots[request_id] = slot
        self._order = ()
        self.admitted += 1
        if admission is None:
            self.table.close(slot)
            return slot
        self.table.admit(slot, admission)
        reference = b"" if admission.voice is None else admission.voice.reference_codes
        self.pump.open(request_id, slot, admission.layout.length, with_codes=with_codes, reference=reference)
        if self._trace is not None:
            while len(self._trace) >= _TRACES_KEPT:
                self._trace.pop(next(iter(self._trace)))
            self._trace[request_id] = []
        return slot

    def finish(self, *request_ids: str) -> None:
        """Send what is left of the requests' audio and free their slots; unknown requests are ignored."""
        slots = [self._slots.pop(name) for name in request_ids if name in self._slots]
        if not slots:
            return
        self._order = ()
        self.finished += len(slots)
        self.pump.close(*slots)
        for slot in slots:
            self.table.release(slot)

    def slots_of(self, request_ids: Sequence[str]) -> np.ndarray:
        """Slots ``[B] int64`` in the order of ``request_ids``; cheap while the batch keeps its composition."""
        if self._order != request_ids:
            self._order_slots = np.fromiter((self._slots[name] for name in request_ids), np.int64, len(request_ids))
            self._order = list(request_ids)
        return self._order_slots

    def stage(self, slots: np.ndarray, positions: np.ndarray) -> StepRows:
        """Start the upload of the rows a step will sample."""
        both = torch.from_numpy(np.stack([slots, positions]).astype(np.int64, copy=False))
        return StepRows(slots, positions, to_device(self._backend, both))

    def step(self, hidden: Tensor, logits: Tensor, rows: StepRows) -> Tensor:
        """Run the frame step for ``rows`` and hand due audio on; returns codebook 0's tokens ``[B] int64``."""
        if self._trace is not None:
            self._keep_trace(hidden, rows)
        (tokens,) = self.frame(hidden, logits, rows.device[0], rows.device[1])
        self.pump.advance(rows.slots, rows.positions)
        return tokens

    def trace(self, request_id: str) -> bytes:
        """Hidden states of a traced request's frames, float32 ``[T, H]`` in row-major bytes.

        Engines may append to the id their front end chose, so the id may be a prefix.
        """
        rows = next((kept for name, kept in (self._trace or {}).items() if name.startswith(request_id)), None)
        return torch.stack(rows).numpy().tobytes() if rows else b""

    def _keep_trace(self, hidden: Tensor, rows: StepRows) -> None:
        assert self._trace is not None
        names = {slot: name for name, slot in self._slots.items()}
        due = self.pump.expects(rows.slots, rows.positions)
        for index in np.flatnonzero(due):
            kept = self._trace.get(names[int(rows.slots[index])])
            if kept is not None:
                kept.append(hidden[index].float().cpu().clone())
