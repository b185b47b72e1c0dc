"""What became of a cell, and the comparison that decides it: the first mismatch with its place and both values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

PASSED, FAILED, NOT_RUN, REFERENCE = "passed", "failed", "not run", "reference"


class NotReachedError(Exception):
    """A cell did not run the path that it is there to compare; its result would say nothing."""


class MismatchError(Exception):
    """A cell's values differ from the reference by more than its tolerance."""


@dataclass
class Outcome:
    """Result of one cell. ``date`` and ``where`` are empty until it has run; ``evidence`` shows the path it took."""

    id: str
    status: str = NOT_RUN
    reason: str = ""
    largest: float | None = None
    mean: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    emulated: bool = False
    date: str = ""
    where: str = ""
    commit: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two arrays are apart."""

    largest: float
    mean: float


def compare(
    found: NDArray[Any], expected: NDArray[Any], axes: Sequence[str], tolerance: float, *, name: str
) -> Difference:
    """Return the difference; raise MismatchError naming the first place outside the tolerance and both values.

    With a tolerance, differences are divided by 1 + |reference|: absolute for small values, relative for large ones;
    their mean may be a tenth of the tolerance. ``axes`` names the dimensions, for example row, frame, codebook. Values
    that are no numbers never agree.
    """
    if found.shape != expected.shape:
        raise MismatchError(f"{name}: shape {list(found.shape)}, reference {list(expected.shape)}")
    if not found.size:
        raise MismatchError(f"{name}: nothing to compare")
    reference = expected.astype(np.float64)
    difference = np.abs(found.astype(np.float64) - reference)
    if tolerance:
        difference /= 1 + np.abs(reference)
    wrong = np.argwhere(~(difference <= tolerance))  # also where a difference is NaN
    if len(wrong):
        place = tuple(int(index) for index in wrong[0])
        where = ", ".join(f"{axis} {index}" for axis, index in zip(axes, place, strict=True))
        raise MismatchError(
            f"{name} differ first at {where}: {found[place]:.6g} instead of {expected[place]:.6g} "
            f"({len(wrong)} of {found.size} differ by more than {tolerance:g}, at most by {np.nanmax(difference):.2e})"
        )
    mean = float(difference.mean())
    if mean > tolerance / 10:
        raise MismatchError(f"{name}: the mean difference is {mean:.2e}, more than a tenth of {tolerance:g}")
    return Difference(float(difference.max()), mean)


def compare_codes(found: NDArray[Any], expected: NDArray[Any], *, name: str) -> Difference:
    """Compare ``[frames, 16]`` codes; the first frame and codebook that differ matter, the rest is a consequence."""
    frames = min(len(found), len(expected))
    if frames:
        compare(found[:frames], expected[:frames], ("frame", "codebook"), 0.0, name=f"{name}: codes")
    if found.shape != expected.shape:
        raise MismatchError(f"{name}: {len(found)} frames instead of {len(expected)}")
    return Difference(0.0, 0.0)


def require(reached: bool, what: str) -> None:
    """Raise NotReachedError unless the path was taken."""
    if not reached:
        raise NotReachedError(f"the path was not reached: {what}")
