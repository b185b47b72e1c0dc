"""What a streaming decoder remembers of its streams, in whatever form it keeps a layer's history; updated in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotTables:
    """``frames [slots] int64`` counts decoded frames; ``tables`` hold one entry per slot for every layer.

    All zeros is the start of a stream. Tables are contiguous, one per layer: devices that copy a strided tensor before
    an in-place update would copy all slots.
    """

    def __init__(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], slots: int, device: torch.device) -> None:
        self.slots = slots
        with torch.inference_mode(False):  # inference tensors could not be updated outside inference mode
            self.frames = torch.zeros(slots, dtype=torch.int64, device=device)
            self.tables = tuple(torch.zeros(slots, *shape, dtype=dtype, device=device) for shape, dtype in shapes)

    @property
    def bytes_per_slot(self) -> int:
        """Device memory of one stream, in bytes."""
        return sum(table[:1].nbytes for table in (self.frames, *self.tables))

    @torch.no_grad()
    def reset(self, slot_ids: Tensor) -> None:
        """Return the slots in ``slot_ids [N] int64`` (on the device) to the start of a stream, in place."""
        for table in (self.frames, *self.tables):
            table.index_fill_(0, slot_ids, 0)

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        """Make slot ``target`` the same as slot ``source``, in place, by contiguous copies."""
        for table in (self.frames, *self.tables):
            table[target : target + 1].copy_(table[source : source + 1])


class FusedState(SlotTables):
    """Histories as the fused decoder's kernels read them."""
