"""The contract of a graph wrapper: call a function of static shapes many times, perhaps through captured device graphs.

Owns the argument rules that every wrapper applies, so that a mistake shows on a CPU as it would on a device. Knows no
device. Three phases: build (allocates nothing), capture (allocates and records), call (allocates its results only).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from qwen3tts_hw.errors import GraphCaptureError

# Takes the rows of one bucket. May return tensors whose first dimension is the rows, and may write in place into
# tensors that it closes over; padding rows then point at a scratch slot, by the pad value of the argument that selects
# the slot.
RowFunction = Callable[..., torch.Tensor | tuple[torch.Tensor, ...] | None]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One argument: its name for messages, its shape after the row dimension, its dtype, and what padding rows hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pad_value: float | int | bool = 0


class GraphWrapper(Protocol):
    """A function of batch-first tensors; the tensors it returns are the caller's to keep and change."""

    @property
    def mode(self) -> str:
        """Either "eager" or "graph"."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Calls, rows, padding rows, and graph replays, in total and per bucket."""

    def capture(self) -> None:
        """Allocate buffers and record the graphs; call once, after weights and state exist and before any request."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run on ``[R, *shape]`` tensors with any R, also 0; raises GraphCaptureError if an argument does not fit."""


class GraphWrapperFactory(Protocol):
    """How owners of a function make a wrapper without knowing which."""

    def __call__(
        self, function: RowFunction, *, buckets: Sequence[int], inputs: Sequence[InputSpec], name: str
    ) -> GraphWrapper:
        """Wrap ``function`` for these row counts; ``name`` is what messages call it."""


def check_arguments(name: str, inputs: Sequence[InputSpec], tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of rows; raises GraphCaptureError naming the argument that does not fit its spec."""
    if len(tensors) != len(inputs) or not tensors:
        expected = ", ".join(spec.name for spec in inputs)
        raise GraphCaptureError(f"{name} takes {len(inputs)} tensors ({expected}), got {len(tensors)}")
    for spec, tensor in zip(inputs, tensors, strict=True):
        if tuple(tensor.shape[1:]) != spec.shape or tensor.dim() == 0:
            raise GraphCaptureError(
                f"{name}: argument {spec.name!r} has shape {list(tensor.shape)}; expected [rows, "
                f"{', '.join(map(str, spec.shape))}]".replace(", ]", "]")
            )
        if tensor.dtype != spec.dtype:
            raise GraphCaptureError(f"{name}: argument {spec.name!r} is {tensor.dtype}; expected {spec.dtype}")
        if tensor.shape[0] != tensors[0].shape[0]:
            raise GraphCaptureError(
                f"{name}: argument {spec.name!r} has {tensor.shape[0]} rows, but {inputs[0].name!r} has "
                f"{tensors[0].shape[0]}"
            )
    return tensors[0].shape[0]


def run_rows(function: RowFunction, name: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Call the function without autograd and return its results as a tuple, checking that each has all rows."""
    with torch.inference_mode():
        results = function(*tensors)
    if results is None:
        return ()
    results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    for index, result in enumerate(results):
        if not isinstance(result, torch.Tensor) or result.shape[:1] != tensors[0].shape[:1]:
            found = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise GraphCaptureError(
                f"{name}: result {index} is {found}; every result must be a tensor of {tensors[0].shape[0]} rows"
            )
    return results
