"""Call a function through graphs captured once per bucket of rows; the same for every device.

Owns buffers, buckets, padding, slicing and error messages. What a device's graph is, comes from a :class:`GraphDriver`.
One wrapper's graphs share a memory pool and its input buffers, so calls of one wrapper must follow each other on one
stream; different wrappers are independent.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from qwen3tts_hw.errors import GraphCaptureError
from qwen3tts_hw.graph_wrappers.base import InputSpec, RowFunction, check_arguments, run_rows

logger = logging.getLogger(__name__)

GraphT = TypeVar("GraphT")
PoolT = TypeVar("PoolT")
_WARM_UP_RUNS = 2  # kernels are chosen and compiled in the first, and run as they will be captured in the second


class GraphDriver(Protocol[GraphT, PoolT]):
    """What a device supplies: graphs, the pool their memory comes from, and recording into them."""

    def new_pool(self) -> PoolT:
        """Make a memory pool that several graphs may share."""

    def new_graph(self) -> GraphT:
        """Make an empty graph."""

    def recording(self, graph: GraphT, pool: PoolT) -> AbstractContextManager[object]:
        """Record the device work of the block into the graph; an error in the block leaves the device usable."""

    def rehearsal(self) -> AbstractContextManager[bool]:
        """Have the kernels that the block starts compiled rather than run; gives False where nothing needs it."""

    def replay(self, graph: GraphT) -> None:
        """Queue the recorded work on the current stream."""

    def is_capturing(self) -> bool:
        """Whether the current stream is recording."""


@dataclass(frozen=True, slots=True)
class _Captured(Generic[GraphT]):
    """A graph and the tensors that its replay reads and writes."""

    graph: GraphT
    inputs: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]


class DeviceGraphWrapper(Generic[GraphT, PoolT]):
    """Replay the smallest captured bucket that holds the rows; above the largest, run in slices of it."""

    mode = "graph"

    def __init__(
        self,
        function: RowFunction,
        driver: GraphDriver[GraphT, PoolT],
        *,
        buckets: Sequence[int],
        inputs: Sequence[InputSpec],
        device: torch.device,
        name: str = "function",
    ) -> None:
        self._buckets = tuple(sorted(set(buckets)))
        if not self._buckets or self._buckets[0] < 1:
            raise GraphCaptureError(f"{name}: buckets are {list(buckets)}; at least one is needed, all at least 1")
        if not inputs:
            raise GraphCaptureError(f"{name}: a captured function needs at least one input")
        self._function = function
        self._driver = driver
        self._inputs = tuple(inputs)
        self._device = device
        self._name = name
        self._captured: dict[int, _Captured[GraphT]] = {}
        names = ("calls", "rows", "padding_rows", "replays", *(f"replays_{bucket}" for bucket in self._buckets))
        self.counters: Counter[str] = Counter(dict.fromkeys(names, 0))

    def capture(self) -> None:
        """Record every bucket, largest first so that smaller ones reuse its memory; raises GraphCaptureError.

        Runs the function with padding rows only. After an error nothing is captured and no buffer is held.
        """
        if self._captured:
            raise GraphCaptureError(f"{self._name} is captured already; capture is done once")
        if self._driver.is_capturing():
            raise GraphCaptureError(f"{self._name} cannot be captured while another graph is being captured")
        logger.info("capturing %s for %s rows", self._name, ", ".join(map(str, self._buckets)))
        begun = time.monotonic()
        captured: dict[int, _Captured[GraphT]] = {}
        bucket = self._buckets[-1]
        try:
            pool = self._driver.new_pool()
            buffers = self._allocate(bucket)
            # All kernels are made at once, which would take minutes if each were made when it is first needed.
            with self._driver.rehearsal() as useful:
                for bucket in reversed(self._buckets) if useful else ():
                    run_rows(self._function, self._name, tuple(buffer[:bucket] for buffer in buffers))
            for bucket in reversed(self._buckets):
                captured[bucket] = self._capture_bucket(tuple(buffer[:bucket] for buffer in buffers), pool)
        except RuntimeError as error:
            captured.clear()
            raise GraphCaptureError(self._explain(bucket, error)) from error
        self._captured = captured
        logger.info("captured %s in %.1f s", self._name, time.monotonic() - begun)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = check_arguments(self._name, self._inputs, tensors)
        if not self._captured:
            raise GraphCaptureError(f"{self._name} was called before capture(); capture it once the weights are loaded")
        if self._driver.is_capturing():
            raise GraphCaptureError(
                f"{self._name} was called while the current stream is capturing another graph; a graph cannot be "
                f"replayed into a graph, so call it outside of the captured region"
            )
        self.counters.update(calls=1, rows=rows)
        largest = self._buckets[-1]
        if 0 < rows <= largest:
            return self._replay(tensors, rows)
        starts = range(0, max(rows, 1), largest)
        parts = [self._replay([t[at : at + largest] for t in tensors], min(largest, rows - at)) for at in starts]
        return tuple(torch.cat(results) for results in zip(*parts, strict=True))

    def _replay(self, tensors: Sequence[torch.Tensor], rows: int) -> tuple[torch.Tensor, ...]:
        bucket = self._buckets[bisect_left(self._buckets, rows)]
        captured = self._captured[bucket]
        if rows:
            for spec, buffer, tensor in zip(self._inputs, captured.inputs, tensors, strict=True):
                buffer[:rows].copy_(tensor, non_blocking=True)
                if rows < bucket:  # an earlier, larger call may have left its rows here
                    buffer[rows:].fill_(spec.pad_value)
            self._driver.replay(captured.graph)
            self.counters.update({"replays": 1, f"replays_{bucket}": 1, "padding_rows": bucket - rows})
        return tuple(result[:rows].clone() for result in captured.results)

    def _allocate(self, rows: int) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(mode=False):  # so that they may be filled from any mode
            return tuple(
                torch.full((rows, *spec.shape), spec.pad_value, dtype=spec.dtype, device=self._device)
                for spec in self._inputs
            )

    def _capture_bucket(self, inputs: tuple[torch.Tensor, ...], pool: PoolT) -> _Captured[GraphT]:
        for _ in range(_WARM_UP_RUNS):
            for spec, buffer in zip(self._inputs, inputs, strict=True):
                buffer.fill_(spec.pad_value)
            run_rows(self._function, self._name, inputs)
        graph = self._driver.new_graph()
        with self._driver.recording(graph, pool):
            results = run_rows(self._function, self._name, inputs)
        return _Captured(graph, inputs, results)

    def _explain(self, bucket: int, error: BaseException) -> str:
        """Say what failed: ending a broken recording may itself raise, and then hides the first error."""
        causes = [error]
        while causes[-1].__context__ is not None:
            causes.append(causes[-1].__context__)
        memory = [
            cause for cause in causes if isinstance(cause, torch.OutOfMemoryError) or "out of memory" in str(cause)
        ]
        if memory:
            return (
                f"the device ran out of memory while {self._name} was captured for {bucket} rows of buckets "
                f"{list(self._buckets)}; lower the largest bucket (setting max_streams), leave more memory free of the "
                f"key/value cache (gpu_memory_utilization), or set graphs to off: {memory[-1]}"
            )
        return f"{self._name} could not be captured for {bucket} rows: {causes[-1]}"
