"""What the streaming decoder remembers between calls: one table per causal layer, indexed by slot.

Owns the memory and its gathering and scattering; does not know what a layer keeps in its table. Everything stays on
the device and no step depends on a value, so a decode step can be recorded in a device graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StateLayout:
    """Collects, while a decoder is built, the shape that each causal layer keeps per slot."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def add(self, *shape: int) -> int:
        """Reserve a table of this shape per slot and return its index."""
        self.shapes.append(shape)
        return len(self.shapes) - 1


class CodecState:
    """Histories and frame counters of ``slots`` independent streams.

    ``frames`` ``[slots] int64`` counts the frames each stream has decoded. ``tables[i]`` is ``[slots, *shapes[i]]``:
    past inputs of a convolution, or past keys and values of an attention layer. All zeros is the start of a stream.
    Tables are contiguous, one per layer: devices that copy a strided tensor before an in-place update would copy all
    slots.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], slots: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.slots = slots
        with torch.inference_mode(False):  # inference tensors could not be updated outside inference mode
            self.frames = torch.zeros(slots, dtype=torch.int64, device=device)
            self.tables = tuple(torch.zeros(slots, *shape, dtype=dtype, device=device) for shape in shapes)

    @property
    def bytes_per_slot(self) -> int:
        """Device memory of one stream, in bytes."""
        return sum(table[:1].nbytes for table in (self.frames, *self.tables))

    @torch.no_grad()
    def reset(self, slot_ids: Tensor) -> None:
        """Return the slots in ``slot_ids`` ``[N] int64`` (on the device) to the start of a stream, in place."""
        for table in (self.frames, *self.tables):
            table.index_fill_(0, slot_ids, 0)

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        """Make slot ``target`` the same as slot ``source``, in place, by contiguous copies."""
        for table in (self.frames, *self.tables):
            table[target : target + 1].copy_(table[source : source + 1])


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
