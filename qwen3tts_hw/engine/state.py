"""Per-request device state, keyed by slot and position.

Every row of every batch looks its own input up with (slot, position), so prefill, chunked prefill, recomputation after
preemption and decode are one code path. The device decides where a request stands (``frontier``) and whether it has
ended; the host never reads these tables in a step. The last slot is scratch: padding rows and rows that must not write
go there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3tts_hw.backends import Backend
from qwen3tts_hw.engine.copies import to_device
from qwen3tts_hw.errors import CapacityError
from qwen3tts_hw.model.sampling import SamplingRows, signed
from qwen3tts_hw.predictor_kernels.base import SlotTensors
from qwen3tts_hw.prompt.layout import PromptLayout
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, ClonedVoice, SamplingSpec


@dataclass(frozen=True, slots=True)
class Admission:
    """What a slot needs to know of a request: its prompt layout, its sampling, its limit in frames.

    ``voice`` is what the layout's speaker row and reference rows hold.
    """

    layout: PromptLayout
    sampling: SamplingSpec
    max_frames: int
    voice: ClonedVoice | None = None


class SlotTable:
    """Device tables for ``num_slots`` requests of up to ``max_positions`` rows each, plus one scratch slot.

    ``codes [S+1, L, 16] int16``: what each position feeds to the codec side, -1 = nothing. ``text [S+1, L] int32``:
    text ids, over the prompt and all later positions. ``frontier [S+1] int64``: first position whose frame does not
    exist yet. ``prompt_rows``, ``max_frames [S+1] int64``; ``ended [S+1] bool``; ``seen [S+1, 2049] bool``: codes
    generated so far. Where voices are cloned, ``speaker [S+1, speaker_width] speaker_dtype`` is added to the row at
    ``speaker_rows [S+1] int64``, -1 = to none; else ``speaker`` is None.
    """

    def __init__(
        self,
        num_slots: int,
        max_positions: int,
        backend: Backend,
        *,
        speaker_width: int | None = None,
        speaker_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_slots, self.max_positions, self.device = num_slots, max_positions, backend.device
        self.backend = backend
        self.scratch = num_slots
        rows = num_slots + 1

        def table(*shape: int, dtype: torch.dtype, fill: float = 0) -> Tensor:
            return torch.full((rows, *shape), fill, dtype=dtype, device=backend.device)

        self.codes = table(max_positions, NUM_CODEBOOKS, dtype=torch.int16, fill=-1)
        self.text = table(max_positions, dtype=torch.int32, fill=-1)
        self.frontier = table(dtype=torch.int64)
        self.prompt_rows = table(dtype=torch.int64)
        self.max_frames = table(dtype=torch.int64)
        self.ended = table(dtype=torch.bool, fill=True)
        self.seen = table(CODEBOOK_SIZE + 1, dtype=torch.bool)
        self.speaker = None if speaker_width is None else table(speaker_width, dtype=speaker_dtype)
        self.speaker_rows = table(dtype=torch.int64, fill=-1)
        # One float and one int64 row per slot, so that admission is a handful of small copies.
        self._floats = table(5, dtype=torch.float32, fill=1.0)
        self._integers = table(4, dtype=torch.int64)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        """Number of slots not taken."""
        return len(self._free)

    def take(self) -> int:
        """Reserve a slot; raise CapacityError if none is left."""
        if not self._free:
            raise CapacityError(f"all {self.num_slots} request slots are in use")
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back and stop the device from making frames for it."""
        self.ended[slot].fill_(True)
        self._free.append(slot)

    def admit(self, slot: int, admission: Admission) -> None:
        """Upload a request's prompt, sampling and limit into ``slot``; everything of an earlier request is gone.

        One copy, and one more for a cloned voice's embedding; the host waits for neither. Numbers are filled in: an
        assignment of one may become a copy from memory that is not pinned, which it would wait for.
        """
        layout, sampling = admission.layout, admission.sampling
        rows = layout.length
        text = np.asarray((*layout.text_ids, *layout.trailing_text_ids), dtype=np.int32)[: self.max_positions]
        codes = np.full((rows, NUM_CODEBOOKS), -1, dtype=np.int16)
        codes[:, 0] = layout.codec_ids
        if admission.voice is not None:
            self._admit_voice(slot, layout, admission.voice, codes)
        elif self.speaker is not None:
            self.speaker_rows[slot].fill_(-1)
        floats, integers = _floats(sampling), _integers(sampling)
        parts = (text, codes.reshape(-1).view(np.int32), floats.view(np.int32), integers)
        packed = to_device(self.backend, torch.from_numpy(np.concatenate(parts)))
        sent = packed.split([len(part) for part in parts])
        self.text[slot].fill_(layout.pad_text_id)
        self.text[slot, : len(text)] = sent[0]
        self.codes[slot, :rows] = sent[1].view(torch.int16).view(rows, NUM_CODEBOOKS)
        self._floats[slot] = sent[2].view(torch.float32)
        self._integers[slot] = sent[3]
        self.frontier[slot].fill_(rows)
        self.prompt_rows[slot].fill_(rows)
        self.max_frames[slot].fill_(admission.max_frames)
        self.seen[slot].fill_(False)
        self.ended[slot].fill_(False)

    def _admit_voice(self, slot: int, layout: PromptLayout, voice: ClonedVoice, codes: NDArray[np.int16]) -> None:
        """Upload a cloned voice's embedding and write its reference into the prompt's ``codes``."""
        assert self.speaker is not None
        embedding = torch.from_numpy(np.frombuffer(voice.embedding, dtype="<f4").copy())
        self.speaker[slot] = to_device(self.backend, embedding)
        self.speaker_rows[slot].fill_(-1 if layout.speaker_row is None else layout.speaker_row)
        if layout.reference_start is not None:
            reference = np.frombuffer(voice.reference_codes, dtype="<i2").reshape(-1, NUM_CODEBOOKS)
            codes[layout.reference_start : layout.reference_start + len(reference)] = reference

    def close(self, slot: int) -> None:
        """Make a slot answer end of speech at once: for requests that carry no speech prompt."""
        self.frontier[slot].fill_(0)
        self.ended[slot].fill_(True)

    def talker_rows(self, slots: Tensor) -> SamplingRows:
        """Sampling parameters of codebook 0 for rows ``[B]``."""
        floats, integers = self._floats[slots], self._integers[slots]
        return SamplingRows(floats[:, 0], integers[:, 0], floats[:, 1])

    def residual_rows(self, slots: Tensor) -> SamplingRows:
        """Sampling parameters of codebooks 1..15 for rows ``[B]``."""
        floats, integers = self._floats[slots], self._integers[slots]
        return SamplingRows(floats[:, 2], integers[:, 1], floats[:, 3])

    def tensors(self) -> SlotTensors:
        """The tensors a fast frame step works on, as they are: what it writes, the table holds."""
        return SlotTensors(
            codes=self.codes,
            frontier=self.frontier,
            prompt_rows=self.prompt_rows,
            max_frames=self.max_frames,
            ended=self.ended,
            seen=self.seen,
            floats=self._floats,
            integers=self._integers,
        )

    def penalty(self, slots: Tensor) -> Tensor:
        """Repetition penalty ``[B] float32``."""
        return self._floats[slots, 4]

    def seeds(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Low and high halves of the seeds, ``[B] int32`` each."""
        halves = self._integers[slots, 2:4].to(torch.int32)
        return halves[:, 0], halves[:, 1]


def _floats(sampling: SamplingSpec) -> NDArray[np.float32]:
    residual = 0.0 if sampling.greedy else sampling.residual_temperature
    values = (sampling.temperature, sampling.top_p, residual, sampling.residual_top_p, sampling.repetition_penalty)
    return np.array(values, dtype=np.float32)


def _integers(sampling: SamplingSpec) -> NDArray[np.int32]:
    halves = signed(sampling.seed), signed(sampling.seed >> 32)
    return np.array((sampling.top_k, sampling.residual_top_k, *halves), dtype=np.int32)
