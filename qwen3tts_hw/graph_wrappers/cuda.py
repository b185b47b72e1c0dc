"""The graph driver for NVIDIA devices: torch.cuda.CUDAGraph."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from qwen3tts_hw.backends.kernels import compiling

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

MOST_URGENT = -5


class CudaGraphDriver:
    """Record on a stream of its own, replay on the caller's.

    Recorded kernels keep the priority of the stream they were recorded on: ``urgent`` ones go before others' wherever
    they are replayed.
    """

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        # A smaller number is more urgent, and numbers below a device's range count as its most urgent.
        self._stream = torch.cuda.Stream(device=device, priority=MOST_URGENT if urgent else 0)

    def new_pool(self) -> _POOL_HANDLE:
        return torch.cuda.graph_pool_handle()

    def new_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def recording(self, graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE) -> AbstractContextManager[object]:
        # "thread_local": another thread that awaits an event or allocates must not break this capture.
        return torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")

    def rehearsal(self) -> AbstractContextManager[bool]:
        return compiling()

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()
