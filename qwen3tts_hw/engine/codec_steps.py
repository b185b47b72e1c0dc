"""The codec as the audio pump uses it: streaming decode in captured steps of a few fixed lengths, 16-bit samples out.

A step of 1, 2, 4 or 8 frames is one graph per bucket of rows; other lengths are made of these, largest first. Longer
steps cost much less per frame, so chunks should be powers of two.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3tts_hw.codec.decoder import CodecDecoder
from qwen3tts_hw.codec.pcm import to_pcm16
from qwen3tts_hw.graph_wrappers import EagerWrapper, GraphWrapper, GraphWrapperFactory, InputSpec
from qwen3tts_hw.types import NUM_CODEBOOKS

FRAME_COUNTS = (8, 4, 2, 1)
ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PLAIN_FRAME_ROWS = 64  # the plain form's graphs hold their activations; a fast form has buffers of bounded size


class CodecSteps:
    """Streaming decode over the state of ``slots`` streams; the last slot is scratch, for padding rows.

    ``most_rows`` bounds the rows of a captured step; more rows than that run in slices. The plain form has a tighter
    bound, on rows times frames. Behind the slots there is room for ``snapshots`` copies of a stream's state.
    """

    def __init__(
        self,
        decoder: CodecDecoder,
        slots: int,
        wrap: GraphWrapperFactory = EagerWrapper,
        *,
        most_rows: int = 64,
        snapshots: int = 0,
    ) -> None:
        self._decoder, self._slots, self.snapshots = decoder, slots, snapshots
        self.state = decoder.new_state(slots + snapshots)
        most = min(most_rows, max(slots - 1, 1))
        self._steps = {
            count: self._wrapped(
                wrap, count, row_buckets(most if decoder.is_fast else min(most, PLAIN_FRAME_ROWS // count))
            )
            for count in FRAME_COUNTS
        }

    @property
    def mode(self) -> str:
        """Either "eager" or "graph"."""
        return self._steps[1].mode

    @property
    def counters(self) -> dict[str, int]:
        """The wrappers' counters, added up."""
        total: Counter[str] = Counter()
        for step in self._steps.values():
            total.update(step.counters)
        return dict(total)

    def capture(self) -> None:
        """Capture all steps; call once, after the weights are loaded and before the first request."""
        for step in self._steps.values():
            step.capture()

    def reset(self, slots: Tensor) -> None:
        """Return streams to their start."""
        self.state.reset(slots)

    @property
    def weights(self) -> int:
        """Which weights states are made with: another number, other weights."""
        return self._decoder.loaded

    def keep(self, slot: int, snapshot: int) -> None:
        """Copy a stream's state to a snapshot."""
        self.state.copy(slot, self._slots + snapshot)

    def restore(self, snapshot: int, slot: int) -> None:
        """Let a stream go on from a snapshot."""
        self.state.copy(self._slots + snapshot, slot)

    def decode(self, codes: Tensor, slots: Tensor) -> Tensor:
        """PCM ``[R, F*1920] int16`` of the next frames ``[R, 16, F]`` of each stream."""
        parts, first = [], 0
        for count in split_frames(codes.shape[2]):
            (pcm,) = self._steps[count](codes[:, :, first : first + count], slots)
            parts.append(pcm)
            first += count
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _step(self, codes: Tensor, slots: Tensor) -> Tensor:
        return to_pcm16(self._decoder.decode_step(codes, self.state, slots))

    def _wrapped(self, wrap: GraphWrapperFactory, frames: int, buckets: tuple[int, ...]) -> GraphWrapper:
        inputs = (
            InputSpec("codes", (NUM_CODEBOOKS, frames), torch.int64),
            InputSpec("slots", (), torch.int64, self._slots - 1),
        )
        return wrap(self._step, buckets=buckets, inputs=inputs, name=f"codec step of {frames} frames")


def row_buckets(most: int) -> tuple[int, ...]:
    """Row counts worth a graph for up to ``most`` rows: close enough that padding costs at most a third from 8 on."""
    top = next((size for size in ROW_BUCKETS if size >= most), ROW_BUCKETS[-1])
    return tuple(size for size in ROW_BUCKETS if size <= top)


def split_frames(frames: int) -> list[int]:
    """Step lengths that make up ``frames``, largest first: 13 = 8 + 4 + 1."""
    lengths: list[int] = []
    for count in FRAME_COUNTS:
        times, frames = divmod(frames, count)
        lengths += [count] * times
    return lengths


def whole_steps(frames: NDArray[np.int64]) -> NDArray[np.int64]:
    """The next lengths that take few steps, for a stream's end: one length of :data:`FRAME_COUNTS` for what is left.

    What is decoded too much stands behind the stream's samples, which do not depend on it.
    """
    lengths = np.array(sorted((0, *FRAME_COUNTS)))
    rest = frames % lengths[-1]
    whole: NDArray[np.int64] = frames - rest + lengths[np.searchsorted(lengths, rest)]
    return whole
