"""From finished frames to audio leaving the device: chunk schedule, batched codec steps, asynchronous copies.

The pump counts frames per slot on the host, optimistically: a request that ended on the device may be counted one frame
too many. Each chunk therefore travels with the slot's true frontier, and the sender, which waits for the copy in a
thread of its own, cuts the chunk to the frames that exist. Codec steps run on a stream of their own beside the talker,
or on a device of their own, batched over all slots that are due the same number of frames. Nothing here knows vLLM or
where packets go.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qwen3tts_hw.backends import Backend, Event
from qwen3tts_hw.engine.codec_steps import FRAME_COUNTS, whole_steps
from qwen3tts_hw.engine.copies import to_device, to_host
from qwen3tts_hw.engine.priming import PrimedStates, Reference, SnapshotDecoder
from qwen3tts_hw.engine.state import SlotTable
from qwen3tts_hw.types import FRAME_CODE_BYTES, NUM_CODEBOOKS, SAMPLES_PER_FRAME

logger = logging.getLogger(__name__)

ALIGNED_STEPS = 2  # of which one decodes long chunks: those that are ready wait for it, and share a step of the codec
ALIGNED_CHUNK = 4  # frames of a long chunk; its stream has as much audio again to play meanwhile
LONGEST_STEP = max(FRAME_COUNTS)
PRIMED_FRAMES_PER_STEP = 128  # of reference audio: ten seconds, more than most references have


@dataclass(frozen=True, slots=True)
class Packet:
    """One chunk of one request on its way out; ``frames_before`` have been sent earlier."""

    request_id: str
    frames: int
    frames_before: int
    last: bool
    pcm: bytes
    codes: bytes


Sink = Callable[[Packet], None]


class ChunkDecoder(SnapshotDecoder, Protocol):
    """What the pump needs of the codec: streaming decode over per-slot state it owns."""

    @property
    def mode(self) -> str:
        """How its steps run: "eager" or "graph"."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What its steps have counted."""

    def capture(self) -> None:
        """Capture its steps."""

    def reset(self, slots: Tensor) -> None:
        """Forget the state of ``slots [R] int64``."""

    def decode(self, codes: Tensor, slots: Tensor) -> Tensor:
        """PCM ``[R, F*1920] int16`` of the next ``codes [R, 16, F] int64`` of each slot."""


@dataclass(slots=True)
class _Stream:
    request_id: str
    slot: int
    prompt_rows: int
    with_codes: bool
    reference: Reference  # the frames that end the prompt
    primed_to: int = 0  # position of the first of them that the codec has not been fed
    sent: int = 0  # written by the sender thread only


@dataclass(slots=True)
class _Job:
    """Copies under way: the sender waits for ``ready`` and then reads the host tensors.

    ``keeps`` holds tensors of the talker's stream that the codec's still reads, so that their memory is not given out
    again.
    """

    streams: list[_Stream]
    starts: list[int]
    frames: int
    last: bool
    ready: Event | None = None
    pcm: Tensor | None = None
    codes: Tensor | None = None
    frontier: Tensor | None = None
    keeps: tuple[Tensor, ...] = ()


class AudioPump:
    """Decode and send the frames of all slots.

    Calls come from the engine's thread; ``sink`` is called from the pump's sender thread, in order per request.
    ``backend`` is the decoder's device, which may be another one than the table's. ``first_frames`` and
    ``steady_frames`` bound the chunk size, which doubles from one to the other.
    """

    def __init__(
        self,
        table: SlotTable,
        decoder: ChunkDecoder,
        backend: Backend,
        sink: Sink,
        *,
        first_frames: int,
        steady_frames: int,
    ) -> None:
        self._table, self._decoder, self._backend, self._sink = table, decoder, backend, sink
        self._first, self._steady = first_frames, steady_frames
        slots = table.num_slots + 1
        self._made = np.zeros(slots, dtype=np.int64)
        self._decoded = np.zeros(slots, dtype=np.int64)
        self._due_at = np.full(slots, np.iinfo(np.int64).max, dtype=np.int64)
        self._prompt = np.zeros(slots, dtype=np.int64)
        self._steps = 0
        self._streams: dict[int, _Stream] = {}
        self._opened: list[int] = []  # slots whose codec state is still to be reset, all together
        self._primed = PrimedStates(decoder)
        self._unprimed: dict[int, None] = {}  # slots whose reference the codec has not been fed to its end, in order
        self._stream = backend.new_stream(priority="low")  # where low is normal, the talker's work has to be high
        self._home = table.backend
        # A copy between devices makes the streams of both wait for each other, so none is the talker's own.
        self._leaving = None if backend.device == self._home.device else self._home.new_stream()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send_jobs, name="qwen3tts-audio", daemon=True)
        self._thread.start()

    @property
    def open_streams(self) -> int:
        """Number of requests whose audio is not finished."""
        return len(self._streams)

    @property
    def queued_jobs(self) -> int:
        """Number of chunks waiting for the sender."""
        return self._jobs.qsize()

    @property
    def mode(self) -> str:
        """How codec steps run: "eager" or "graph"."""
        return self._decoder.mode

    @property
    def counters(self) -> Mapping[str, int]:
        """What the codec's steps have counted."""
        return self._decoder.counters

    @property
    def references(self) -> Mapping[str, int]:
        """How often the codec was fed a reference, how often that was spared, and how many it has kept."""
        return self._primed.counters

    def capture(self) -> None:
        """Capture the codec's steps; call once, before the first stream is opened."""
        if self._leaving is None:
            self._decoder.capture()
            return
        with self._backend.on_stream(self._stream):  # which makes its device the current one, too
            self._decoder.capture()
        self._backend.synchronize()

    def open(
        self, request_id: str, slot: int, prompt_rows: int, *, with_codes: bool = False, reference: bytes = b""
    ) -> None:
        """Start a stream in ``slot``; its codec state is reset.

        Where the prompt ends with frames of reference audio, codes ``[R, 16] int16`` in bytes, the stream continues
        them: the codec is fed the reference, without output, before the first frame, or takes the state that it had
        when it was last fed this one.
        """
        self._made[slot] = self._decoded[slot] = 0
        self._due_at[slot] = self._first
        self._prompt[slot] = prompt_rows
        first = prompt_rows - len(reference) // FRAME_CODE_BYTES
        heard = self._primed.reference(reference)
        self._streams[slot] = _Stream(request_id, slot, prompt_rows, with_codes, heard, first)
        self._opened.append(slot)
        if reference:
            self._unprimed[slot] = None
            self._prime()

    def advance(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Count the frames a step made: rows ``(slot, position)`` that :meth:`expects` picks made one."""
        self._raise_sender_error()
        self._reset_opened()
        if self._unprimed:
            self._prime()
        made = slots[self.expects(slots, positions)]
        self._made[made] += 1
        due = made[self._made[made] >= self._due_at[made]]
        if self._steps % ALIGNED_STEPS:
            due = due[self._due_at[due] - self._decoded[due] < ALIGNED_CHUNK]
        if self._unprimed:
            due = np.array([slot for slot in due if int(slot) not in self._unprimed], dtype=np.int64)
        if len(due):
            self._decode(due, self._due_at[due])
        self._steps += 1

    def expects(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which rows ``(slot, position)`` stand right before the host's idea of the frontier, ``[B] bool``."""
        return np.asarray(positions + 1 == self._prompt[slots] + self._made[slots])

    def close(self, *slots: int, send: bool = True) -> None:
        """End the streams of ``slots``: decode what is left and mark it last, or drop it if nobody listens."""
        ending = [slot for slot in slots if slot in self._streams]
        for slot in ending:
            if slot in self._unprimed:
                if send and self._made[slot]:
                    self._prime_slot(slot)
                self._unprimed.pop(slot, None)
        if send and ending:
            self._decode_rest(np.array(ending))
        for slot in ending:
            del self._streams[slot]
            self._due_at[slot] = np.iinfo(np.int64).max

    def shut_down(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, then stop the sender thread."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _reset_opened(self) -> None:
        """Return the codec's state of new streams to the start: one kernel per table, however many streams."""
        if not self._opened:
            return
        self._hand_over()  # the state itself, which the talker's stream has made
        with self._backend.on_stream(self._stream):  # the rows, too: their memory is only reused in this stream
            self._decoder.reset(to_device(self._backend, torch.tensor(self._opened)))
        self._opened = []

    def _prime(self) -> None:
        """Feed the codec references, oldest stream first, as much as one step may delay other streams' audio."""
        self._reset_opened()
        calls = PRIMED_FRAMES_PER_STEP // LONGEST_STEP  # whole ones: all streams of a voice get the same
        for slot in list(self._unprimed):
            calls -= self._prime_slot(slot, calls)

    def _prime_slot(self, slot: int, most_calls: int | None = None) -> int:
        """Bring ``slot`` to the end of its reference, or as far as so many calls of the codec go; returns how many."""
        stream = self._streams[slot]
        calls = 0
        with self._backend.on_stream(self._stream):
            if self._primed.restore(stream.reference, slot):
                stream.primed_to = stream.prompt_rows
        if stream.primed_to < stream.prompt_rows:
            needed = -(-(stream.prompt_rows - stream.primed_to) // LONGEST_STEP)
            calls = needed if most_calls is None else min(needed, most_calls)
            self._feed(stream, min(stream.prompt_rows, stream.primed_to + calls * LONGEST_STEP))
            if calls == needed:
                with self._backend.on_stream(self._stream):
                    self._primed.keep(stream.reference, slot)
        if stream.primed_to == stream.prompt_rows:
            del self._unprimed[slot]
        return calls

    def _feed(self, stream: _Stream, stop: int) -> None:
        """Feed the codec the frames of the stream's reference up to position ``stop``.

        All tensors belong to the codec's stream, or live as long as the slot table: none needs to be kept.
        """
        if stop == stream.primed_to:
            return
        (reference,) = self._hand_over(self._table.codes[stream.slot, stream.primed_to : stop])
        with self._backend.on_stream(self._stream):
            rows = to_device(self._backend, torch.tensor([stream.slot]))
            for codes in reference.split(LONGEST_STEP):
                self._decoder.decode(codes.to(torch.int64).t()[None].contiguous(), rows)
        stream.primed_to = stop

    def _hand_over(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The tensors, which the talker's stream is still to fill, as the codec's stream may read them."""
        home, backend = self._home, self._backend
        if self._leaving is None:
            self._stream.wait_stream(home.current_stream())
            return tensors
        self._leaving.wait_stream(home.current_stream())
        with home.on_stream(self._leaving), backend.on_stream(self._stream):
            copy_ahead = backend.capabilities.async_copy
            return [tensor.to(backend.device, non_blocking=copy_ahead) for tensor in tensors]

    def _decode(self, slots: np.ndarray, until: np.ndarray) -> None:
        """Decode each slot's frames up to number ``until``."""
        sizes = until - self._decoded[slots]
        self._decode_groups(slots, sizes)
        self._decoded[slots] = until
        self._due_at[slots] = until + np.clip(2 * sizes, self._first, self._steady)

    def _decode_rest(self, slots: np.ndarray) -> None:
        """Decode all that is left of streams that end, in the chunks they would have had, and the last in one piece."""
        while len(due := slots[self._made[slots] >= self._due_at[slots]]):
            self._decode(due, self._due_at[due])
        self._decode_groups(slots, whole_steps(self._made[slots] - self._decoded[slots]), last=True)

    def _decode_groups(self, slots: np.ndarray, sizes: np.ndarray, *, last: bool = False) -> None:
        """Decode the next ``sizes`` frames of ``slots``, those with the same number of frames together."""
        for frames in np.unique(sizes):
            self._decode_group(slots[sizes == frames], int(frames), last=last)

    def _decode_group(self, slots: np.ndarray, frames: int, *, last: bool) -> None:
        """Decode ``frames`` frames of each slot and start their copies to the host."""
        table, backend = self._table, self._backend
        starts, streams = self._decoded[slots], [self._streams[int(slot)] for slot in slots]
        if not frames:
            self._jobs.put(_Job(streams, starts.tolist(), 0, last))
            return
        rows = to_device(self._home, torch.from_numpy(np.stack([slots, self._prompt[slots] + starts])))
        slot_rows, first_rows = rows[0], rows[1]
        positions = first_rows[:, None] + torch.arange(frames, device=table.device)
        codes = table.codes[slot_rows[:, None], positions.clamp(max=table.max_positions - 1)]  # [R, F, 16]
        frontier = table.frontier[slot_rows]
        job = _Job(streams, starts.tolist(), frames, last, ready=backend.new_event())
        job.keeps = (codes, frontier, rows)
        codes, frontier, slot_rows = self._hand_over(codes, frontier, slot_rows)
        with backend.on_stream(self._stream):
            pcm = self._decoder.decode(codes.to(torch.int64).transpose(1, 2), slot_rows)
            job.pcm, job.frontier = to_host(backend, pcm), to_host(backend, frontier)
            if any(stream.with_codes for stream in streams):
                job.codes = to_host(backend, codes)
            assert job.ready is not None
            job.ready.record(self._stream)
        self._jobs.put(job)

    def _send_jobs(self) -> None:
        """Body of the sender thread."""
        while (job := self._jobs.get()) is not None:
            try:
                for packet in _packets(job):
                    self._sink(packet)
            except Exception as error:  # thread boundary: logged here, raised in the engine's next step
                logger.exception("the audio sender failed")
                self._error = error

    def _raise_sender_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError("audio could not be sent; see the log above") from error


def _packets(job: _Job) -> Iterable[Packet]:
    """Wait for a job's copies and cut each stream's chunk to the frames that exist."""
    if job.ready is not None:
        job.ready.synchronize()
    for index, stream in enumerate(job.streams):
        real = 0
        pcm = codes = b""
        if job.pcm is not None and job.frontier is not None:
            exists = int(job.frontier[index]) - stream.prompt_rows - job.starts[index]
            real = max(0, min(job.frames, exists))
            pcm = job.pcm[index, : real * SAMPLES_PER_FRAME].numpy().tobytes()
            if stream.with_codes and job.codes is not None:
                codes = job.codes[index, :real].reshape(-1, NUM_CODEBOOKS).numpy().tobytes()
        before = stream.sent
        stream.sent += real
        yield Packet(stream.request_id, real, before, job.last, pcm, codes)
