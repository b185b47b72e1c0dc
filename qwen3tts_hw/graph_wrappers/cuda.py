"""The graph driver for NVIDIA devices: torch.cuda.CUDAGraph."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class CudaGraphDriver:
    """Record on a stream of its own, replay on the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device=device)

    def new_pool(self) -> _POOL_HANDLE:
        return torch.cuda.graph_pool_handle()

    def new_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def recording(self, graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE) -> AbstractContextManager[object]:
        # "thread_local": another thread that awaits an event or allocates must not break this capture.
        return torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()
