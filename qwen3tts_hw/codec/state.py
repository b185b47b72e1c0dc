"""What the streaming decoder remembers between calls: one table per causal layer, indexed by slot.

Owns the memory and its gathering and scattering; does not know what a layer keeps in its table. Everything stays on
the device and no step depends on a value, so a decode step can be recorded in a device graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3tts_hw.codec_kernels.state import SlotTables


class StateLayout:
    """Collects, while a decoder is built, the shape that each causal layer keeps per slot."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def add(self, *shape: int) -> int:
        """Reserve a table of this shape per slot and return its index."""
        self.shapes.append(shape)
        return len(self.shapes) - 1


class CodecState(SlotTables):
    """Histories and frame counters of ``slots`` independent streams.

    ``tables[i]`` is ``[slots, *shapes[i]]``: past inputs of a convolution, or past keys and values of an attention
    layer.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], slots: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__([(shape, dtype) for shape in shapes], slots, device)


class StateRows:
    """The rows of one call: row ``r`` continues the stream in slot ``slots[r]``.

    A slot may occur more than once only if its stream does not matter (padding rows): one of its rows wins.
    """

    def __init__(self, state: CodecState, slots: Tensor) -> None:
        self._state, self._slots = state, slots
        self.start = state.frames.index_select(0, slots)  # [R]: position of the first new frame

    def extend(self, table: int, new: Tensor, *, dim: int) -> Tensor:
        """Return the kept entries followed by ``new`` along ``dim``; keep the last entries for the next call."""
        kept = self._state.tables[table]
        length = kept.shape[dim]
        joined = torch.cat((kept.index_select(0, self._slots), new), dim)
        kept.index_copy_(0, self._slots, joined.narrow(dim, joined.shape[dim] - length, length))
        return joined

    def advance(self, frames: int) -> None:
        """Count ``frames`` more decoded frames for every row."""
        self._state.frames.index_copy_(0, self._slots, self.start + frames)
