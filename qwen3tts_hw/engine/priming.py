"""Codec states of references heard lately, from which another stream of the same voice starts by a copy on the device.

Owns which reference each of the decoder's snapshots holds; the memory is the decoder's. Calls are made in the codec's
stream and only queue work there, so a snapshot may be replaced while a stream that starts from it is still to be
decoded.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol


class SnapshotDecoder(Protocol):
    """What is needed of the codec."""

    @property
    def snapshots(self) -> int:
        """How many streams' states it can keep."""

    @property
    def weights(self) -> int:
        """Which weights states are made with: another number, other weights."""

    def keep(self, slot: int, snapshot: int) -> None:
        """Copy a stream's state to a snapshot."""

    def restore(self, snapshot: int, slot: int) -> None:
        """Let a stream go on from a snapshot."""


class Reference(NamedTuple):
    """Codes ``[R, 16] int16`` of a reference in bytes, and which weights the codec hears them with."""

    codes: bytes
    weights: int


class PrimedStates:
    """Snapshots by reference, the least recently used replaced first.

    ``primed`` counts the references that were fed to the codec to their end, ``restored`` the streams that began with
    a copy instead.
    """

    def __init__(self, decoder: SnapshotDecoder) -> None:
        self._decoder = decoder
        self._held: OrderedDict[Reference, int] = OrderedDict()
        self.primed = 0
        self.restored = 0

    @property
    def counters(self) -> dict[str, int]:
        """For operators and tests."""
        return {"primed": self.primed, "restored": self.restored, "kept": len(self._held)}

    def reference(self, codes: bytes) -> Reference:
        """What a stream that begins now with these codes of a reference hears."""
        return Reference(codes, self._decoder.weights)

    def restore(self, reference: Reference, slot: int) -> bool:
        """Let ``slot`` be as if it had been fed the reference; False if that one is not kept."""
        snapshot = self._held.get(reference)
        if snapshot is None:
            return False
        self._held.move_to_end(reference)
        self._decoder.restore(snapshot, slot)
        self.restored += 1
        return True

    def keep(self, reference: Reference, slot: int) -> None:
        """Remember the state of ``slot``, which has just been fed the whole reference, which was not kept."""
        self.primed += 1
        if not self._decoder.snapshots:
            return
        full = len(self._held) == self._decoder.snapshots
        snapshot = self._held.popitem(last=False)[1] if full else len(self._held)
        self._held[reference] = snapshot
        self._decoder.keep(slot, snapshot)
