"""The graph driver for Ascend devices: torch.npu.NPUGraph.

Lengths inside a captured function are constant per bucket, so no parameter is updated between replays and
``auto_dispatch_capture`` stays off. Fused attention must be an operator that may be captured (see attention_ops).
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from qwen3tts_hw.backends.npu import task_queue
from qwen3tts_hw.errors import UnsupportedError

_NOT_CAPTURED = {  # how work is handed to the device -> the variable that says so, and what it should be
    "2": "TASK_QUEUE_ENABLE is 2, with which torch_npu captures no graph; set it to 1",
    "blocking": "ASCEND_LAUNCH_BLOCKING is 1, with which device graphs do not work; unset it",
}


class NpuGraphDriver:
    """Record on a stream of its own, replay on the caller's. Graph and pool are torch_npu's own objects.

    Raises UnsupportedError where the process hands work to the device in a way that cannot be captured.
    """

    def __init__(self, device: torch.device) -> None:
        refusal = _NOT_CAPTURED.get(task_queue())
        if refusal is not None:
            raise UnsupportedError(f"{refusal}, or set graphs to off")
        self._npu: Any = importlib.import_module("torch_npu").npu
        self._stream = self._npu.Stream(device=device)

    def new_pool(self) -> object:
        return self._npu.graph_pool_handle()

    def new_graph(self) -> object:
        return self._npu.NPUGraph()

    def recording(self, graph: object, pool: object) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", self._npu.graph(graph, pool=pool, stream=self._stream))

    def rehearsal(self) -> AbstractContextManager[bool]:
        return nullcontext(False)  # its kernels are compiled already

    def replay(self, graph: object) -> None:
        cast(Any, graph).replay()

    def is_capturing(self) -> bool:
        return bool(self._npu.is_current_stream_capturing())
